#include "program/run/run_records.h"

#include <cmath>
#include <limits>
#include <string>
#include <variant>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <fmt/ranges.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

constexpr const char *kPlan = "plan", *kMicroBatch = "micro_batch";

}  // namespace

double without_nan_sign(double number) {
  return std::isnan(number) ? std::numeric_limits<double>::quiet_NaN() : number;
}

StepRecord record_of(int64_t step, const StepResult& result, const MemoryMeter::Report& memory) {
  StepRecord record;
  record.step = step;
  record.grad_norm = without_nan_sign(result.grad_norm());
  record.loss_scale = result.scale();
  record.stepped = result.stepped();
  record.items = result.items;
  record.micro_batches = result.micro_batches;
  record.peak_bytes = result.peak_bytes;
  record.activation_peak_bytes = result.activation_peak_bytes;
  record.memory = {.parameters = memory.parameters,
                   .gradients = memory.gradients,
                   .optimizer_state = memory.optimizer_state,
                   .activations = memory.activations,
                   .workspace = memory.workspace,
                   .other = memory.outputs + memory.before};
  if (result.bytes_sent > 0) {
    record.communication = {.bytes_sent = result.bytes_sent,
                            .seconds = result.communication_seconds,
                            .waited = result.communication_waited};
  }
  return record;
}

RunEvent event_of(int64_t step, const StepPlan& plan) {
  return {.name = kPlan,
          .step = step,
          .details = {{kMicroBatch, plan.choice.items},
                      {"micro_batches", plan.choice.micro_batches},
                      {"predicted_peak_bytes", plan.choice.peak_bytes},
                      {"predicted_seconds", plan.choice.seconds},
                      {"explanation", plan.explain()}}};
}

int64_t planned_micro_batch(const RunHistory& log, int64_t step) {
  const RunEvent* plan = newest_event(log, kPlan, step);
  const LogValue* size = plan == nullptr ? nullptr : find_value(plan->details, kMicroBatch);
  return size == nullptr ? 0 : std::get<int64_t>(*size);
}

std::vector<RunEvent> events_of(int64_t step, const StepResult& result) {
  std::vector<RunEvent> events;
  if (result.step_downs > 0) {
    events.push_back({.name = "out of memory", .step = step, .details = {{"made_again_with_less", result.step_downs}}});
  }
  if (!result.plan_deviation.empty()) {
    events.push_back({.name = "deviation", .step = step, .details = {{"from_plan", result.plan_deviation}}});
  }
  for (const std::string& change : result.precision_changes) {
    events.push_back({.name = "precision", .step = step, .details = {{"change", change}}});
  }
  for (const GradientStatistics& s : result.gradient_statistics) {
    events.push_back({.name = "gradients",
                      .step = step,
                      .details = {{"parameter", s.name},
                                  {"elements", s.elements},
                                  {"zeros", s.zeros},
                                  {"non_finite", s.non_finite},
                                  {"lowest_exponent", int64_t{GradientStatistics::kLowest}},
                                  {"exponents", fmt::format("{}", fmt::join(s.exponents, " "))}}});
    if (s.lost_updates) {
      events.back().details.emplace_back("lost_updates", *s.lost_updates);
    }
  }
  return events;
}

void check_finite(const StepRecord& record, const torch::nn::Module& model) {
  constexpr double kLargest = std::numeric_limits<double>::infinity();
  const at::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    if (!std::isfinite(at::linalg_vector_norm(item.value(), kLargest).item<double>())) {
      throw NonFinite(fmt::format(
          "train: after step {} parameter '{}' is not finite: its gradients had a norm of {} at the learning "
          "rate {:.3g}, and the loss was {}. Snapshots are from before; begin a new run with a lower --lr, "
          "or a longer --warmup",
          record.step, item.key(), record.grad_norm, record.learning_rate, record.loss));
    }
  }
}

}  // namespace snug::detail
