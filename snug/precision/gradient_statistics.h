#pragma once
// Gradient statistics: how large the gradients of each parameter are, as a histogram of their exponents, next to what is lost at both ends
// of a 16-bit type. It is the picture that shows why the loss is scaled. Take it every N steps, between backward and the next zero_grad.
//
//   scaler.unscale_(optimizer);
//   for (const auto& s : snug::gradient_statistics(model->named_parameters().pairs())) log(s.name, s.zeros, s.exponents);

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
  /// How many of the others have |g| in [2^e, 2^(e+1)), for e from kLowest to kHighest.
  std::array<int64_t, kHighest - kLowest + 1> exponents{};
  /// Of the weights whose gradient is not 0, the share that a step did not move in 16 bits; see LostUpdates. Empty: not measured.
  std::optional<double> lost_updates;

  /// Share of all elements with |g| * scale below `smallest`, zeros included, such as 2^-24 for FP16: what would underflow to zero or nearly.
  double share_below(double smallest, double scale = 1) const;
};

/// Of the gradients of named parameters; those without a gradient are left out. Waits for the device once. One pass over each gradient, and
/// an FP32 copy of one at a time.
std::vector<GradientStatistics> gradient_statistics(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters);

/// How much of a step 16-bit weights do not see, since it is less than half their distance: what FP32 weights, masters or stochastic rounding
/// are for. Weights in FP32 are rounded to `dtype` before they are compared.
///
///   auto statistics = snug::gradient_statistics(parameters);
///   const snug::LostUpdates lost(parameters, torch::kBFloat16);
///   optimizer.step();
///   lost.add_to(statistics);
class LostUpdates {
 public:
  /// Keeps a copy in `dtype`, kHalf or kBFloat16, of each parameter that has a gradient.
  LostUpdates(const std::vector<std::pair<std::string, at::Tensor>>& named_parameters, c10::ScalarType dtype);

  /// `statistics`: those of the same parameters, with the same gradients. Waits for the device once.
  void add_to(std::vector<GradientStatistics>& statistics) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> before_;
};

}  // namespace snug
