#pragma once
// Gradient statistics: the sizes of the gradients of each parameter, as a histogram of their exponents, next to the
// shares that are lost at both ends of a 16-bit type. They show why the loss is scaled. Take them every N steps,
// between backward and the next zero_grad.
//
//   scaler.unscale_(optimizer);
//   for (const auto& s : snug::gradient_statistics(model->named_parameters().pairs())) {
//     log(s.name, s.zeros, s.exponents);
//   }

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

struct GradientStatistics {
  static constexpr int kLowest = -40;  ///< exponents below are counted with it
  static constexpr int kHighest = 20;  ///< exponents above are counted with it

  std::string name;
  int64_t elements = 0;
  int64_t zeros = 0;       ///< exactly 0: dead units, unused rows, or underflow
  int64_t non_finite = 0;  ///< infinite or NaN: overflow
  /// The number of the other elements with |g| in [2^e, 2^(e+1)), for e from kLowest to kHighest.
  std::array<int64_t, kHighest - kLowest + 1> exponents{};
  /// Among the weights whose gradient is not 0, the share that a step did not change in 16 bits; see LostUpdates.
  /// Empty: not measured.
  std::optional<double> lost_updates;

  /// Share of all elements with |g| * scale below `smallest`, zeros included. With `smallest` = 2^-24 for FP16, it is
  /// the share that would become zero or nearly zero.
  double share_below(double smallest, double scale = 1) const;
};

/// Statistics of the gradients of named parameters; parameters without a gradient are left out. Waits for the device
/// once. One pass over each gradient, and an FP32 copy of one at a time.
std::vector<GradientStatistics> gradient_statistics(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters);

/// The part of a step that 16-bit weights lose, because it is less than half the distance between their values. FP32
/// weights, masters or stochastic rounding avoid this loss. FP32 weights are rounded to `dtype` before they are
/// compared.
///
///   auto statistics = snug::gradient_statistics(parameters);
///   const snug::LostUpdates lost(parameters, torch::kBFloat16);
///   optimizer.step();
///   lost.add_to(statistics);
class LostUpdates {
 public:
  /// Keeps a copy in `dtype`, kHalf or kBFloat16, of each parameter that has a gradient.
  LostUpdates(const std::vector<std::pair<std::string, at::Tensor>>& named_parameters, c10::ScalarType dtype);

  /// `statistics`: of the same parameters, with the same gradients. Waits for the device once.
  void add_to(std::vector<GradientStatistics>& statistics) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> before_;
};

}  // namespace snug
