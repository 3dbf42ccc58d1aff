#include "snug/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include "snug/core/error.h"
#include "snug/optim/detail/adam_rules.h"

namespace snug {
namespace {

constexpr const char* kSteps = "steps";
constexpr const char* kFactors = "factors";

using detail::is_rate;

std::vector<double> factors_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> factors;
  for (const auto& group : optimizer.param_groups()) {
    const double lr = group.options().get_lr();
    if (!is_rate(lr) || (factors.empty() && lr == 0)) {
      throw ConfigError(fmt::format(
          "LrSchedule: parameter group {} has the learning rate {}; give the first group one above 0 and each other "
          "group its share of that",
          factors.size(), lr));
    }
    factors.push_back(lr);
  }
  if (factors.empty()) {
    throw ConfigError("LrSchedule: the optimizer has no parameter groups");
  }
  const double first = factors.front();
  for (double& factor : factors) {
    factor /= first;
  }
  return factors;
}

std::vector<double> saved_factors(const StateDict& state, size_t groups) {
  const at::Tensor& saved = state.get<at::Tensor>(kFactors);
  if (saved.scalar_type() != at::kDouble || saved.dim() != 1 || static_cast<size_t>(saved.size(0)) != groups) {
    throw CorruptFile(
        fmt::format("LrSchedule.load_state_dict: factors is {} numbers of type {}; the optimizer has {} parameter "
                    "groups and each has a double",
                    saved.numel(), c10::toString(saved.scalar_type()), groups));
  }
  const at::Tensor values = saved.cpu().contiguous();
  std::vector<double> factors(values.const_data_ptr<double>(), values.const_data_ptr<double>() + groups);
  if (!std::all_of(factors.begin(), factors.end(), is_rate)) {
    throw CorruptFile("LrSchedule.load_state_dict: factors has a number that is negative or not finite");
  }
  return factors;
}

}  // namespace

LrSchedule::LrSchedule(torch::optim::Optimizer& optimizer, std::function<double(int64_t)> rate)
    : optimizer_(&optimizer), rate_(std::move(rate)), factors_(factors_of(optimizer)) {
  if (!rate_) {
    throw ConfigError("LrSchedule: rate is empty; give a function of the step");
  }
  set_rates(checked_rate(0));
}

void LrSchedule::step(bool stepped) {
  if (!stepped) {
    return;
  }
  check_groups();
  const double rate = checked_rate(steps_ + 1);
  ++steps_;
  set_rates(rate);
}

double LrSchedule::checked_rate(int64_t step) const {
  const double rate = rate_(step);
  if (!is_rate(rate)) {
    throw ConfigError(
        fmt::format("LrSchedule: the learning rate of step {} is {}; it must be finite and at least 0", step, rate));
  }
  return rate;
}

void LrSchedule::check_groups() const {
  const size_t now = optimizer_->param_groups().size();
  if (now != factors_.size()) {
    throw ConfigError(
        fmt::format("LrSchedule: the optimizer had {} parameter groups and now has {}; make the LrSchedule after the "
                    "last add_param_group",
                    factors_.size(), now));
  }
}

void LrSchedule::set_rates(double rate) {
  for (size_t i = 0; i < factors_.size(); ++i) {
    optimizer_->param_groups()[i].options().set_lr(rate * factors_[i]);
  }
  lr_ = rate;
}

StateDict LrSchedule::state_dict() const {
  StateDict state;
  state.set(kSteps, steps_);
  state.set(kFactors, at::tensor(factors_, at::kDouble));
  return state;
}

void LrSchedule::load_state_dict(const StateDict& state) {
  const int64_t steps = state.get<int64_t>(kSteps);
  if (steps < 0) {
    throw CorruptFile(fmt::format("LrSchedule.load_state_dict: steps is {}; steps are counted from 0", steps));
  }
  check_groups();
  std::vector<double> factors = saved_factors(state, factors_.size());
  const double rate = checked_rate(steps);
  steps_ = steps;
  factors_ = std::move(factors);
  set_rates(rate);
}

}  // namespace snug
