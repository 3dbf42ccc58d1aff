#pragma once
// StepInBackward: each parameter is updated as soon as backward has its gradient, which is then freed. So gradients of
// the whole model are never there together: their bytes are saved, for the price of what needs all of them (clipping by
// norm, loss scaling, accumulation).
//
//   snug::AdamW optimizer(model->parameters());
//   snug::StepInBackward in_backward(optimizer);
//   for (...) {
//     loss_of(batch).backward();     // the model is updated when this returns
//   }

#include <memory>

#include "snug/optim/fused_optimizer.h"

namespace snug {
namespace detail {
class GradientHooks;
}

/// Gives the same bits as backward(), then step(): an optimizer updates each parameter by itself. One backward a step;
/// a GradScaler, a Stepper and further backward passes into the same gradients do not go with it. An exception in
/// backward leaves those parameters updated whose gradients were complete.
class [[nodiscard]] StepInBackward final {
 public:
  /// `optimizer` must outlive the guard. Throws ConfigError if a parameter has such a hook already.
  explicit StepInBackward(FusedOptimizer& optimizer);
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

 private:
  std::unique_ptr<detail::GradientHooks> hooks_;
};

}  // namespace snug
