#pragma once
// GradientHooks: calls made during backward when a leaf's gradient is complete. LibTorch has one place for that per tensor, so who comes
// second must know that it is taken.

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Whether something, such as StepInBackward, is called when backward has completed the gradient of `leaf`. It may use
/// the gradient up.
bool has_gradient_hook(const at::Tensor& leaf);

class GradientHooks final {
 public:
  GradientHooks() = default;
  /// Takes the calls back.
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// From now on backward calls `call(leaf)`. `leaf` must have no gradient hook.
  void set(const at::Tensor& leaf, std::function<void(const at::Tensor& leaf)> call);

 private:
  std::vector<at::Tensor> leaves_;
};

}  // namespace snug::detail
