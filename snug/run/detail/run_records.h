#pragma once
// What a step leaves in the run log, and what it must not leave in the model.

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>

#include "snug/memory/meter.h"
#include "snug/report/run_log.h"
#include "snug/step/stepper.h"

namespace snug::detail {

/// All that the step itself knows: not its loss, learning rate and times. Waits for the device.
StepRecord record_of(int64_t step, const StepResult& result, const MemoryReport& memory);

/// "plan": what memory_budget was met with.
RunEvent event_of(int64_t step, const StepPlan& plan);

/// "precision" for each region that the guard moved, "out of memory" and "deviation" where a step was not as planned, "gradients" for each parameter whose gradient was sampled.
std::vector<RunEvent> events_of(int64_t step, const StepResult& result);

/// Throws NonFinite, naming a parameter that is not finite after a step that was not skipped: no later one mends it.
void check_finite(const StepRecord& record, const torch::nn::Module& model);

}  // namespace snug::detail
