#pragma once
// GradientHooks: calls made during backward when a leaf's gradient is complete. LibTorch has room for one such call per
// tensor, so a second user must find out that the place is taken.

#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Whether a hook, such as StepInBackward's, is called when backward has completed the gradient of `leaf`. The hook may
/// use the gradient up.
bool has_gradient_hook(const at::Tensor& leaf);
/// Whether that must not run in a backward pass that is made to be profiled.
bool has_lasting_gradient_hook(const at::Tensor& leaf);

class GradientHooks final {
 public:
  enum class Runs { InStepsOnly, InProfilesToo };

  GradientHooks() = default;
  /// Removes the hooks, where no other has taken their place.
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// From now on backward calls `call(leaf)`. `leaf` must have no gradient hook.
  void set(const at::Tensor& leaf, std::function<void(const at::Tensor& leaf)> call, Runs runs = Runs::InStepsOnly);

 private:
  std::vector<std::pair<at::Tensor, const void*>> hooks_;  // by leaf
};

}  // namespace snug::detail
