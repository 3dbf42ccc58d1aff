#pragma once
// Gradient statistics: how large the gradients of each parameter are, as a histogram of their exponents, next to what is lost at both ends
// of a 16-bit type. It is the picture that shows why the loss is scaled. Take it every N steps, between backward and the next zero_grad.
//
//   scaler.unscale_(optimizer);
//   for (const auto& s : snug::gradient_statistics(model->named_parameters().pairs())) log(s.name, s.zeros, s.exponents);

#include <array>
#include <cstdint>
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

  /// Share of all elements with |g| * scale below `smallest`, zeros included, such as 2^-24 for FP16: what would underflow to zero or nearly.
  double share_below(double smallest, double scale = 1) const;
};

/// Of the gradients of named parameters; those without a gradient are left out. Waits for the device once. One pass over each gradient, and
/// an FP32 copy of one at a time.
std::vector<GradientStatistics> gradient_statistics(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters);

}  // namespace snug
