#pragma once
// What an optimizer will allocate, as far as that can be told before it steps, and what a plan tells of a step's bytes
// besides activations.

#include <cstdint>
#include <functional>
#include <unordered_set>

#include <ATen/core/Tensor.h>

#include "snug/step_plan.h"
#include "src/step/model_place.h"
#include "src/step/state_place.h"
#include "src/step/step_to_plan.h"
#include "src/step/trained_parameters.h"

namespace snug::detail {

/// Bytes that an optimizer allocates and gives back in a step. A StatefulOptimizer says so itself. torch's go parameter
/// by parameter, so it is what the largest takes; so it is of others with torch's options, and else about three times
/// the largest.
int64_t workspace_bytes(const torch::optim::Optimizer& optimizer);

/// Whether the next number is known: of each StatefulOptimizer that does not say otherwise, and of torch's Adam, AdamW,
/// RMSprop, SGD and Adagrad. Others may keep anything, or hand gradients on to optimizers that have their state
/// already.
bool knows_state_to_come(const torch::optim::Optimizer& optimizer);

/// Bytes of state that an optimizer will allocate in its first step, for the parameters that it has none for and that
/// get a gradient: those that are trained, if nothing else is said. 0 where it is not known: then the second step plans
/// again.
int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer,
                            const std::function<bool(const at::Tensor&)>& gets_gradient = &at::Tensor::requires_grad);

/// The state that an optimizer has yet to allocate, of all that is trained or of those that a loss gives no gradient
/// to: a generator's, while its discriminator trains.
class StateToCome {
 public:
  /// Both must outlive it.
  StateToCome(const torch::optim::Optimizer& optimizer, const TrainedParameters& parameters);

  /// A backward pass from here will be made.
  void note(const at::Tensor& loss);
  int64_t bytes() const { return bytes_; }
  /// Of that, for parameters that none of the losses so far gives a gradient to.
  int64_t idle_bytes() const;

 private:
  const torch::optim::Optimizer& optimizer_;
  const TrainedParameters& parameters_;
  int64_t bytes_;
  std::unordered_set<const void*> reached_;
};

/// Weights, gradients and optimizer state with `what` in files, as far as it can leave. The FP32 masters that the
/// Stepper makes are weights.
BytesByKind bytes_by_kind(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                          const TrainedParameters& parameters, const ModelPlace& model_place,
                          const StatePlace& state_place, InFiles what);

}  // namespace snug::detail
