#pragma once
// What a plan tells of a step's bytes besides activations: weights, gradients and optimizer state, in memory or
// outside.

#include "snug/step/detail/model_place.h"
#include "snug/step/detail/state_place.h"
#include "snug/step/detail/step_to_plan.h"
#include "snug/step/detail/trained_parameters.h"
#include "snug/step/step_plan.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// With `what` in files, as far as it can leave. The FP32 masters that the Stepper makes are weights.
BytesByKind bytes_by_kind(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                          const TrainedParameters& parameters, const ModelPlace& model_place,
                          const StatePlace& state_place, InFiles what);

}  // namespace snug::detail
