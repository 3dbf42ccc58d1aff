#pragma once
// GradientHooks: calls made during backward when a leaf's gradient is complete. LibTorch has room for a single hook of
// this kind per tensor, so a second user must find out about the first user.

#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Whether a hook, such as StepInBackward's, is called when backward has completed the gradient of `leaf`. The hook may
/// consume the gradient.
bool has_gradient_hook(const at::Tensor& leaf);
/// Whether `leaf` has a gradient hook that must not run in a backward pass made for a profile.
bool has_lasting_gradient_hook(const at::Tensor& leaf);

class GradientHooks final {
 public:
  enum class Runs { InStepsOnly, InProfilesToo };

  GradientHooks() = default;
  /// Removes the hooks, except hooks that another hook has replaced.
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// From now on backward calls `call(leaf)`. `leaf` must have no gradient hook.
  void set(const at::Tensor& leaf, std::function<void(const at::Tensor& leaf)> call, Runs runs = Runs::InStepsOnly);

 private:
  std::vector<std::pair<at::Tensor, const void*>> hooks_;  // by leaf
};

}  // namespace snug::detail
