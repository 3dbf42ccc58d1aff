#pragma once
// The capabilities of an optimizer. No other file asks for an optimizer's kind. An answer comes from an interface of
// snug/optimizer.h, if the optimizer has the interface; from knowledge of torch's optimizers; or is the careful answer.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/optimizer.h"
#include "snug/state.h"

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// The interfaces of an optimizer.
struct OptimizerCapabilities {
  GradientScalingAware* scaling;  // null: the optimizer neither unscales nor skips
  StatefulOptimizer* state;       // null: only torch's archive has the state
  UpdateAware& update;            // an optimizer without the interface gives no promise
  MovableState* movable_state;    // null: the state stays
};
OptimizerCapabilities capabilities_of(torch::optim::Optimizer& optimizer);

/// The optimizers behind a JoinedOptimizers; otherwise the optimizer itself.
std::vector<torch::optim::Optimizer*> optimizers_in(torch::optim::Optimizer& optimizer);

/// Has a JoinedOptimizers take the groups of its optimizers. No effect on any other optimizer.
void take_groups(torch::optim::Optimizer& optimizer);

/// The types of optimizers_in(), for people.
std::string kind_of(const torch::optim::Optimizer& optimizer);

/// All tensors of a state.
std::vector<at::Tensor> tensors_in(const StateDict& state);

/// The state tensors in this process: the very tensors, not copies. Some may be undefined. Of torch's optimizers, SGD,
/// Adam, AdamW, RMSprop, Adagrad and LBFGS are supported. Other optimizers without MemoryAware and StatefulOptimizer
/// give no tensors.
std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer);

/// Bytes that an optimizer allocates and gives back in a step:
/// - A MemoryAware optimizer says the number itself.
/// - torch's optimizers go parameter by parameter, so the number is the need of the largest parameter. The same holds
///   for other optimizers with torch's options.
/// - For any other optimizer, the number is about three times the largest parameter.
/// - JoinedOptimizers take the sum of the early optimizers' numbers, and the largest number of the late optimizers.
int64_t workspace_bytes(const torch::optim::Optimizer& optimizer);

/// Whether state_bytes_to_come() is known: for MemoryAware optimizers, and for torch's Adam, AdamW, RMSprop, SGD and
/// Adagrad. Other optimizers may keep anything, or hand gradients on to optimizers that have their state already.
bool knows_state_to_come(const torch::optim::Optimizer& optimizer);

/// Whether step() needs a function that computes the loss again.
bool needs_closure(const torch::optim::Optimizer& optimizer);

/// Bytes of state that an optimizer will allocate in its first step, for the parameters without state that get a
/// gradient. By default all trained parameters get a gradient. 0 if unknown: then the second step plans again.
int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer,
                            const std::function<bool(const at::Tensor&)>& gets_gradient = &at::Tensor::requires_grad);

}  // namespace snug::detail
