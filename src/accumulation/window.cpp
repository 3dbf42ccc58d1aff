#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include "snug/accumulation.h"
#include "snug/core.h"
#include "src/core/file_memory.h"
#include "src/core/lazy_values.h"
#include "src/core/read_later.h"

// The loss of a step is L = (sum of s_i) / (sum of n_i) over micro-batches with sums s_i and counts n_i. The divisor N
// = sum of n_i is known only after the last forward, and backward cannot wait for it. Each micro-batch is therefore
// divided by a provisional count P, taken from the first one, and the gradients are multiplied by P / N at the end. If
// counts are as expected, P equals N and nothing is multiplied: one micro-batch then gives exactly the bits of (s /
// n).backward(). Dividing at once, and not only at the end, keeps FP16 gradients in range. A mean m_i enters as m_i *
// (n_i / P).

namespace snug {

// A parameter of a shared module may be named twice, but close() must not correct its gradient twice.
AccumulationWindow::AccumulationWindow(std::vector<std::pair<std::string, at::Tensor>> parameters)
    : parameters_(std::move(parameters)) {
  std::unordered_set<const void*> seen;
  std::erase_if(parameters_, [&](const auto& p) { return !seen.insert(p.second.unsafeGetTensorImpl()).second; });
}

void AccumulationWindow::begin() {
  reset();
  metrics_.clear();  // not at the end, because close() needs the names
  is_open_ = true;
  for (const auto& [name, parameter] : parameters_) {
    versions_.push_back(parameter._version());
  }
}

void AccumulationWindow::reset() {
  is_open_ = false;
  versions_.clear();
  size_ = 0;
  items_ = 0;
  items_on_device_.reset();
  loss_sum_.reset();
  provisional_ = 0;
  provisional_on_device_.reset();
  counts_ = nullptr;
}

void AccumulationWindow::check_parameters() const {
  for (size_t i = 0; i < versions_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    if (parameter._version() != versions_[i]) {
      throw ConfigError(fmt::format(
          "Stepper: parameter '{}' was written inside the accumulation window, by loss_of, before_update or between "
          "micro-batches; its gradient would mix two models. Write only between windows. For a layer that masks its "
          "own weight in forward: compute with weight * mask, or take the batch at once, without a planned budget",
          name));
    }
  }
}

void AccumulationWindow::divide_by(double items) { provisional_ = items; }

at::Tensor AccumulationWindow::weigh(const Loss& loss, double expected_parts) {
  if (!is_open_) {
    begin();
  }
  check_parameters();
  if (size_ == 0) {
    kind_ = loss.kind();
  }
  if (loss.kind() != kind_) {
    throw ConfigError(
        "Stepper: the micro-batches of one step gave different kinds of Loss; give the same kind for all");
  }
  if (kind_ == Loss::Kind::Whole && size_ > 0) {
    throw ConfigError("Stepper: a Loss::whole cannot be split or accumulated; use one micro-batch per step");
  }
  ++size_;
  const bool is_mean = kind_ == Loss::Kind::Mean;
  const at::Tensor value = loss.value().reshape({});
  const auto add = [](at::Tensor& total, const at::Tensor& term) { total = total.defined() ? total + term : term; };
  // The loss, or a vector of the loss and the metrics.
  const auto numbers = [&] {
    std::vector<at::Tensor> all{value.detach().to(at::kDouble)};
    std::vector<std::string> names;
    for (const auto& [name, metric] : loss.metrics()) {
      // A copy to the host must wait: the host reads at once.
      all.push_back(metric.reshape({}).to(value.device(), at::kDouble, /*non_blocking=*/!value.is_cpu()));
      names.push_back(name);
    }
    if (loss_sum_.defined() && names != metrics_) {
      throw ConfigError(fmt::format(
          "Stepper: the micro-batches of one step gave different metrics, [{}] and [{}]; give the same names, in the "
          "same order, for all",
          fmt::join(metrics_, ", "), fmt::join(names, ", ")));
    }
    metrics_ = std::move(names);
    return metrics_.empty() ? all.front() : at::stack(all);
  };

  if (loss.count_tensor().defined()) {
    const at::Tensor count = loss.count_tensor().reshape({}).to(value.device(), at::kDouble);
    if (provisional_ > 0) {
      provisional_on_device_ = at::full_like(count, provisional_);
    } else {
      const at::Tensor expected = (count * expected_parts).round().clamp_min(1);
      // As long as there were no items, there were no gradients either, and the divisor is still free.
      provisional_on_device_ = provisional_on_device_.defined()
                                   ? at::where(items_on_device_ > 0, provisional_on_device_, expected)
                                   : expected;
    }
    add(items_on_device_, count);
    counts_ = detail::read_later(at::stack({items_on_device_, provisional_on_device_}));
    add(loss_sum_, numbers());
    const auto wide = at::promote_types(value.scalar_type(), at::kFloat);  // in FP16 the divisor may be infinite
    return value.to(wide) / provisional_on_device_.to(value.device(), wide);
  }
  const int64_t items = loss.count();
  const auto count = static_cast<double>(items);
  if (count == 0) {
    return {};
  }
  if (provisional_ == 0) {
    const bool is_chosen = items_on_device_.defined() && items_on_device_.item<double>() > 0;
    const double expected = kind_ == Loss::Kind::Whole ? 1.0 : std::max(1.0, std::round(count * expected_parts));
    provisional_ = is_chosen ? provisional_on_device_.item<double>() : expected;
  }
  items_ += items;
  add(loss_sum_, is_mean ? numbers() * count : numbers());
  if (provisional_ == (is_mean ? count : 1)) {  // a factor of 1 would be an operator in each step for nothing
    return value;
  }
  return is_mean ? value * (count / provisional_) : value / provisional_;
}

AccumulationWindow::Totals AccumulationWindow::close(const SumOverRanks& sum_over_ranks) {
  check_parameters();
  Totals totals;
  totals.micro_batches = size_;
  auto items = static_cast<double>(items_);
  double provisional = provisional_;
  if (counts_) {
    const at::Tensor counts = counts_();
    items += counts[0].item<double>();
    if (provisional == 0) {
      provisional = counts[1].item<double>();
    }
  }
  if (!sum_over_ranks) {
    detail::whole_count(items);  // while the window is still open
  }
  at::Tensor loss_sum = loss_sum_;
  reset();
  if (sum_over_ranks) {
    sum_over_ranks(items, loss_sum);
  }
  totals.items = detail::whole_count(items);
  if (totals.items == 0) {
    return totals;
  }
  totals.mean_loss = loss_sum / static_cast<double>(totals.items);
  if (totals.mean_loss.dim() > 0) {
    const std::vector<at::Tensor> means = totals.mean_loss.unbind();
    totals.mean_loss = means.front();
    for (size_t i = 0; i < metrics_.size(); ++i) {
      totals.metrics.emplace(metrics_[i], means[i + 1]);
    }
  }
  totals.correction = provisional / static_cast<double>(totals.items);
  if (totals.correction != 1.0) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const auto& [name, parameter] : parameters_) {
      if (parameter.grad().defined()) {
        gradients.push_back(detail::resolved_gradient(parameter));
      }
    }
    detail::for_each_in_files(gradients, [&](at::TensorList some) { at::_foreach_mul_(some, totals.correction); });
  }
  return totals;
}

double AccumulationWindow::to_mean() const {
  const bool is_known = items_ > 0 && !items_on_device_.defined();
  return is_known ? provisional_ / static_cast<double>(items_) : std::numeric_limits<double>::quiet_NaN();
}

void AccumulationWindow::abandon() {
  reset();
  for (auto& [name, parameter] : parameters_) {
    parameter.mutable_grad().reset();
  }
}

}  // namespace snug
