#pragma once
// Checks of a Stepper's options before the first step, and the description by which the plans of an earlier program are
// found.

#include <string>

#include <c10/core/Device.h>

#include "snug/stepper.h"
#include "src/step/step_ranks.h"

namespace snug::detail {

/// Throws ConfigError, naming the value, for options that cannot work.
void check(const StepperOptions& options);

/// Options with absolute directories, which stay the same if the program changes its working directory.
StepperOptions lasting(StepperOptions options);

/// Throws BudgetExceeded if more than `budget` is alive already or if `budget` is below what a limit on `device` needs;
/// ConfigError if `budget` cannot be kept on `device`.
void check_budget(Bytes budget, c10::Device device);

/// Throws ConfigError for a model that one rank cannot try alone, and for options that need a plan if no plans are
/// made.
void check_planning(const torch::nn::Module& model, const StepperOptions& options, const StepRanks& ranks, bool plans);

/// The precision of a state for a Stepper with `options`. Throws ConfigError if the state is of another precision, or
/// of other weights.
Precision check_state(const StateDict& state, const StepperOptions& options, Precision precision);

/// Everything that plans depend on: versions, threads, rank, options, and the names, types, sizes and kinds of device
/// of parameters and buffers. Two Steppers with one description may use each other's plans. Not in the description:
/// - StepKind and StepCounts, which are kept with each plan;
/// - the operators of the model, which a step shows.
///
/// `budget`: the smallest budget of all ranks.
std::string describe_stepper(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                             const StepperOptions& options, const StepRanks& ranks, Precision precision, Bytes budget);

}  // namespace snug::detail
