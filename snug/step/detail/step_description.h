#pragma once
// The description of a Stepper, by which the plans of an earlier program are found.

#include <string>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "snug/core/bytes.h"
#include "snug/precision/precision.h"
#include "snug/step/stepper.h"

namespace snug::detail {

/// All that plans depend on, but for what is told with each of them (StepKind, PlannedFor) and the operators of the
/// model, which a step shows: versions, threads, rank, options, and the names, types, sizes and kinds of device of
/// parameters and buffers. Two Steppers with one description may use each other's plans. `budget`: the smallest of all
/// ranks.
std::string describe_stepper(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                             const StepperOptions& options, Precision precision, Bytes budget);

}  // namespace snug::detail
