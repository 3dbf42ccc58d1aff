#pragma once
// The records of a step for the run log, and a check of the model after a step.

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>

#include "program/report/run_log.h"
#include "snug/memory.h"
#include "snug/stepper.h"

namespace snug::detail {

/// The same number. A NaN loses the sign, because the sign means nothing and is printed.
double without_nan_sign(double number);

/// The record of a step without loss, learning rate and times. Waits for the device.
StepRecord record_of(int64_t step, const StepResult& result, const MemoryMeter::Report& memory);

/// "plan": the plan that met the memory budget.
RunEvent event_of(int64_t step, const StepPlan& plan);

/// The micro-batch of the newest plan in the log up to `step`; 0 without a plan.
int64_t planned_micro_batch(const RunHistory& log, int64_t step);

/// Events of a step: "precision" for each region that the guard moved, "out of memory" and "deviation" if a step was
/// not as planned, "gradients" for each parameter whose gradient was sampled.
std::vector<RunEvent> events_of(int64_t step, const StepResult& result);

/// Throws NonFinite, naming the parameter, if a parameter is not finite after the step: no later step can repair the
/// parameter.
void check_finite(const StepRecord& record, const torch::nn::Module& model);

}  // namespace snug::detail
