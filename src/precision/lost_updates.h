#pragma once
// LostUpdates: the share of a step that 16-bit weights lose, for GradientStatistics::lost_updates.

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "snug/precision.h"

namespace snug::detail {

/// The part of a step that 16-bit weights lose, because the part is less than half the distance between neighbouring
/// 16-bit values. FP32 weights, masters or stochastic rounding avoid this loss. FP32 weights are rounded to `dtype`
/// before the comparison.
///
///   auto statistics = gradient_statistics(parameters);
///   const LostUpdates lost(parameters, torch::kBFloat16);
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

}  // namespace snug::detail
