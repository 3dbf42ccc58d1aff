#pragma once
// What a Stepper makes of its options before it starts, and the description by which the plans of an earlier program
// are found.

#include <string>

#include <c10/core/Device.h>

#include "snug/stepper.h"

namespace snug::detail {

/// Throws ConfigError, naming the value, for options that cannot work.
void check(const StepperOptions& options);

/// With directories that stay the same however the program changes its own.
StepperOptions lasting(StepperOptions options);

/// Throws BudgetExceeded if more than that is alive already, ConfigError if it cannot be kept on that device.
void check_budget(Bytes budget, c10::Device device);

/// Throws ConfigError for a model that cannot be tried by one rank alone.
void check_planning(const torch::nn::Module& model, const StepperOptions& options, bool plans);

/// Of a state that a Stepper with `options` is to take: its precision. Throws ConfigError if that, or what the weights
/// are, is another.
Precision check_state(const StateDict& state, const StepperOptions& options, Precision precision);

/// All that plans depend on, but for what is told with each of them (StepKind, StepCounts) and the operators of the
/// model, which a step shows: versions, threads, rank, options, and the names, types, sizes and kinds of device of
/// parameters and buffers. Two Steppers with one description may use each other's plans. `budget`: the smallest of all
/// ranks.
std::string describe_stepper(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                             const StepperOptions& options, Precision precision, Bytes budget);

}  // namespace snug::detail
