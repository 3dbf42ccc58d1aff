#pragma once
// The bytes that an optimizer will allocate, as far as the bytes are known before the first step; and the bytes of a
// step that a plan reports besides activations.

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

/// Bytes that an optimizer allocates and gives back in a step:
/// - A StatefulOptimizer says the number itself.
/// - torch's optimizers go parameter by parameter, so the number is the need of the largest parameter. The same holds
///   for other optimizers with torch's options.
/// - For any other optimizer, the number is about three times the largest parameter.
int64_t workspace_bytes(const torch::optim::Optimizer& optimizer);

/// Whether state_bytes_to_come() is known. Known: each StatefulOptimizer unless the optimizer says otherwise, and
/// torch's Adam, AdamW, RMSprop, SGD and Adagrad. Other optimizers may keep anything, or hand gradients on to
/// optimizers that have their state already.
bool knows_state_to_come(const torch::optim::Optimizer& optimizer);

/// Bytes of state that an optimizer will allocate in its first step, for the parameters without state that get a
/// gradient. By default all trained parameters get a gradient. 0 if unknown: then the second step plans again.
int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer,
                            const std::function<bool(const at::Tensor&)>& gets_gradient = &at::Tensor::requires_grad);

/// The state that an optimizer has yet to allocate: of all trained parameters, or of parameters to which a loss gives
/// no gradient, such as a generator's parameters while the discriminator trains.
class StateToCome {
 public:
  /// `optimizer` and `parameters` must outlive the StateToCome.
  StateToCome(const torch::optim::Optimizer& optimizer, const TrainedParameters& parameters);

  /// For a loss from which a backward pass will be made.
  void note(const at::Tensor& loss);
  int64_t bytes() const { return bytes_; }
  /// The part of bytes() for parameters to which no loss so far gives a gradient.
  int64_t idle_bytes() const;

 private:
  const torch::optim::Optimizer& optimizer_;
  const TrainedParameters& parameters_;
  int64_t bytes_;
  std::unordered_set<const void*> reached_;
};

/// Weights, gradients and optimizer state under a placement, as far as the parts can leave memory. The FP32 masters
/// that the Stepper makes are weights.
BytesByKind bytes_by_kind(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                          const TrainedParameters& parameters, const ModelPlace& model_place,
                          const StatePlace& state_place, Placement placement);

}  // namespace snug::detail
