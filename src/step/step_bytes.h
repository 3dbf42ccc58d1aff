#pragma once
// The bytes of a step that a plan counts besides activations.

#include <cstdint>
#include <unordered_set>

#include <ATen/core/Tensor.h>

#include "snug/step_plan.h"
#include "src/step/model_place.h"
#include "src/step/state_place.h"
#include "src/step/step_to_plan.h"
#include "src/step/trained_parameters.h"

namespace snug::detail {

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
