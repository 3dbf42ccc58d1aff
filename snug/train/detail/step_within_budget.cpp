#include "snug/train/detail/step_within_budget.h"

#include <ATen/ATen.h>

namespace snug::detail {

void StepBackup::take() {
  const at::NoGradGuard no_grad;
  generators_ = RngState::capture();
  buffers_ = model_.buffers();
  copies_.resize(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (!copies_[i].defined() || !copies_[i].sizes().equals(buffers_[i].sizes()) ||
        copies_[i].dtype() != buffers_[i].dtype()) {
      copies_[i] = at::empty_like(buffers_[i]);
    }
    copies_[i].copy_(buffers_[i]);
  }
}

void StepBackup::restore() const {
  const at::NoGradGuard no_grad;
  generators_->restore();
  for (size_t i = 0; i < buffers_.size(); ++i) {
    at::Tensor(buffers_[i]).copy_(copies_[i]);
  }
}

int64_t StepBackup::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& copy : copies_) {
    bytes += static_cast<int64_t>(copy.nbytes());
  }
  return bytes;
}

StepWithinBudget::StepWithinBudget(torch::nn::Module& model, const StepperOptions& options, RankedStep& ranks,
                                   TrainedParameters& parameters, std::function<void()> abandon)
    : ranks_(ranks),
      parameters_(parameters),
      abandon_(std::move(abandon)),
      budget_(options.memory_budget),
      backup_(model) {
  const bool plans = options.plan && parameters.device().is_cpu();
  budget_ = ranks.smallest_budget(options.memory_budget, plans);
  if (!plans || budget_.is_unlimited()) {
    return;
  }
  OffloadLink link;
  try {
    link = options.offload ? measure_offload_link(*options.offload) : OffloadLink{};
  } catch (...) {  // the other ranks wait for this one in check()
    no_link_ = std::current_exception();
  }
  planner_.emplace(budget_, options.split_batch_norm, std::move(link));
}

void StepWithinBudget::check() const {
  ranks_.check_all_fit(budget_, live_bytes(parameters_.device()).count(), no_link_);
  check_budget(budget_, parameters_.device());
}

// Ranks that have planned for such a step before need not try anything, so where all have they go on at once.
const StepPlan* StepWithinBudget::plan(StepToPlan step) {
  if (ranks_.is_alone()) {
    return step.batch > 0 ? plan_here(step) : nullptr;
  }
  RankSplit own = planner_->look(step);
  AgreedSplit all = ranks_.agree_on_split(own);
  while (!all.is_settled) {
    step.at_most = all.at_most;
    if (step.batch > 0) {
      plan_here(step);
      own = planner_->planned(step);
    }
    all = ranks_.agree_on_split(own);
  }
  planner_->keep(step, all);
  return step.batch > 0 ? planner_->last() : nullptr;
}

const StepPlan* StepWithinBudget::plan_here(const StepToPlan& step) {
  const Rehearsal rehearsal = ranks_.rehearse();
  return planner_->plan(step);
}

// What to take less of is a rank's own: where another one ran out of memory, there is nothing to be done here.
RankedStep::Failure StepWithinBudget::after_memory(Repeats repeats) {
  const bool can_take_less =
      planner_ && !ranks_.is_dropped() && !is_writing_ && planner_->step_down(!deviation_.empty());
  const bool can_repeat = repeats == Repeats::OnAllRanks || (repeats == Repeats::Alone && ranks_.is_alone());
  if (can_take_less && !can_repeat) {
    planner_->settle();  // for the next one
  }
  return can_take_less && can_repeat && step_downs_ < kMostStepDowns ? RankedStep::Failure::TakesLess
                                                                     : RankedStep::Failure::Memory;
}

void StepWithinBudget::give_up(RankedStep::Failure failure, Bytes smallest) {
  is_again_ = false;
  abandon_();
  is_again_ = ranks_.fail(failure, parameters_.accumulated(), smallest);
}

void StepWithinBudget::begin_try(Repeats repeats) {
  if (repeats == Repeats::OnAllRanks) {
    ranks_.begin_split();
  }
}

void StepWithinBudget::restore() {
  deviation_.clear();
  if (!is_writing_) {
    backup_.restore();
  }
}

}  // namespace snug::detail
