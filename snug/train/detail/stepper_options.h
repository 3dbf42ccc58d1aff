#pragma once
// What a Stepper makes of its options before it starts.

#include <c10/core/Device.h>

#include "snug/train/stepper.h"

namespace snug::detail {

/// Throws ConfigError, naming the value, for options that cannot work.
void check(const StepperOptions& options);

/// Auto is measured.
Precision resolve(Precision precision, c10::Device device);
GradScalerOptions scaler_options(GradScalerOptions options, Precision precision);
PrecisionGuardOptions guard_options(PrecisionGuardOptions options, Precision asked);

}  // namespace snug::detail
