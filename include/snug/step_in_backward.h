#pragma once
// StepInBackward: updates each parameter as soon as backward has the parameter's gradient, and then frees the gradient.
// The gradients of the whole model are never in memory together. The price: operations on all gradients (clipping by
// norm, loss scaling, accumulation) are not possible.
//
//   snug::AdamW optimizer(model->parameters());
//   snug::StepInBackward in_backward(optimizer);
//   for (...) {
//     loss_of(batch).backward();     // the model is updated when this returns
//   }

#include <memory>

#include "snug/fused_optimizer.h"

namespace snug {
namespace detail {
class GradientHooks;
}

/// Gives the same bits as backward(), then step(), because an optimizer updates each parameter by itself. One backward
/// per step. StepInBackward cannot be combined with a GradScaler, a Stepper or further backward passes into the same
/// gradients. After an exception in backward, the parameters whose gradients were complete are updated.
class [[nodiscard]] StepInBackward final {
 public:
  /// `optimizer` must outlive the guard. Throws ConfigError if a parameter has a gradient hook already.
  explicit StepInBackward(FusedOptimizer& optimizer);
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

 private:
  std::unique_ptr<detail::GradientHooks> hooks_;
};

}  // namespace snug
