#pragma once
// What a Stepper makes of its options before it starts.

#include <c10/core/Device.h>

#include "snug/step/stepper.h"

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

/// Auto is measured.
Precision resolve(Precision precision, c10::Device device);
GradScalerOptions scaler_options(GradScalerOptions options, Precision precision);
PrecisionGuardOptions guard_options(PrecisionGuardOptions options, Precision asked);

}  // namespace snug::detail
