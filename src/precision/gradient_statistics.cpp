#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "snug/precision.h"

namespace snug {
namespace {

constexpr int64_t kBins = GradientStatistics::kHighest - GradientStatistics::kLowest + 1;

// [zeros, not finite, counts of exponents] of one gradient, on the gradient's device. The exponent is read from the
// bits of the FP32 number, so the exponent is exact. FP32's subnormals, below 2^-126, are in the lowest bin anyway.
at::Tensor counts_of(const at::Tensor& gradient) {
  const at::Tensor bits =
      gradient.detach().to(at::kFloat).contiguous().flatten().view(at::kInt).bitwise_and(0x7FFFFFFF);
  const at::Tensor exponent = bits.bitwise_right_shift(23);  // 255 for infinities and NaN
  const at::Tensor is_zero = bits == 0;
  const at::Tensor non_finite = exponent == 255;
  const at::Tensor bin = (exponent - 127 - GradientStatistics::kLowest).clamp(0, kBins - 1);
  const at::Tensor counted = is_zero.logical_or(non_finite).logical_not();
  const at::Tensor histogram =
      at::zeros({kBins}, bits.options().dtype(at::kLong)).scatter_add_(0, bin.to(at::kLong), counted.to(at::kLong));
  return at::cat({is_zero.sum().reshape({1}), non_finite.sum().reshape({1}), histogram});
}

}  // namespace

std::vector<GradientStatistics> gradient_statistics(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters) {
  const at::NoGradGuard no_grad;
  std::vector<GradientStatistics> result;
  std::vector<at::Tensor> counts;
  for (const auto& [name, parameter] : named_parameters) {
    if (!parameter.grad().defined()) {
      continue;
    }
    const at::Tensor gradient = parameter.grad().is_sparse() ? parameter.grad().coalesce()._values() : parameter.grad();
    counts.push_back(counts_of(gradient));
    result.emplace_back();
    result.back().name = name;
    result.back().elements = gradient.numel();
  }
  if (result.empty()) {
    return result;
  }
  const at::Tensor table = at::stack(counts).cpu();
  const auto rows = table.accessor<int64_t, 2>();
  for (size_t i = 0; i < result.size(); ++i) {
    const auto row = rows[static_cast<int64_t>(i)];
    result[i].zeros = row[0];
    result[i].non_finite = row[1];
    for (int64_t b = 0; b < kBins; ++b) {
      result[i].exponents[static_cast<size_t>(b)] = row[b + 2];
    }
  }
  return result;
}

}  // namespace snug
