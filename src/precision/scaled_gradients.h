#pragma once
// The operations of a GradScaler on an optimizer's gradients: finding gradients, dividing and checking gradients, and
// naming parameters whose gradients are not finite.

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// The position of a parameter in an optimizer.
struct ParameterPlace {
  at::Tensor parameter;
  size_t group;
  size_t index;  // within the group
};

class ParameterNames {
 public:
  void set(const std::vector<std::pair<std::string, at::Tensor>>& names);
  /// "parameter 'layer.weight' [2, 3]", or without a name "parameter 1 of group 0 [2, 3]".
  std::string describe(const ParameterPlace& place) const;

 private:
  std::unordered_map<const void*, std::string> names_;
};

/// The parameters that have a gradient, each gradient once.
std::vector<ParameterPlace> gradients_of(const torch::optim::Optimizer& optimizer);

/// For each device an FP32 scalar: 1 if a gradient on the device is not finite.
using FoundInf = std::vector<std::pair<c10::Device, at::Tensor>>;

/// Multiplies the gradients by `inverse` (FP32 scalar) in place. Does not wait for the device.
FoundInf unscale_and_check(const std::vector<ParameterPlace>& places, const at::Tensor& inverse);
/// Checks the gradients, and divides nothing. On the CPU, check_finite only reads.
FoundInf check_finite(const std::vector<ParameterPlace>& places);

/// "parameter 'layer.weight' [2, 3], whose gradient holds inf"; empty if all gradients are finite. Waits for the
/// device.
std::string first_non_finite(const std::vector<ParameterPlace>& places, const ParameterNames& names);

}  // namespace snug::detail
