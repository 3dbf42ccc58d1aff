#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "snug/accumulation.h"
#include "snug/core.h"

namespace snug {

Loss::Loss(Kind kind, at::Tensor value, int64_t count, at::Tensor count_tensor)
    : kind_(kind), value_(std::move(value)), count_(count), count_tensor_(std::move(count_tensor)) {
  if (!value_.defined() || value_.numel() != 1) {
    throw ConfigError(
        fmt::format("Loss: the value must be a scalar tensor, not {}; reduce it with sum() or mean()",
                    value_.defined() ? fmt::format("[{}]", fmt::join(value_.sizes(), ", ")) : "undefined"));
  }
  if (count_ < 0) {
    throw ConfigError(fmt::format("Loss: count is {}; it is a number of items, >= 0", count_));
  }
  if (count_tensor_.defined() && count_tensor_.numel() != 1) {
    throw ConfigError(
        fmt::format("Loss: count must be a scalar tensor, not [{}]", fmt::join(count_tensor_.sizes(), ", ")));
  }
}

Loss Loss::sum(at::Tensor sum, int64_t count) { return {Kind::Sum, std::move(sum), count, {}}; }
Loss Loss::sum(at::Tensor sum, at::Tensor count) { return {Kind::Sum, std::move(sum), 0, std::move(count)}; }
Loss Loss::mean(at::Tensor mean, int64_t count) { return {Kind::Mean, std::move(mean), count, {}}; }
Loss Loss::whole(at::Tensor loss) { return {Kind::Whole, std::move(loss), 1, {}}; }

Loss Loss::with(const std::string& name, const at::Tensor& value) const {
  if (!value.defined() || value.numel() != 1) {
    throw ConfigError(fmt::format("Loss.with: the metric '{}' must be a scalar tensor, not {}", name,
                                  value.defined() ? fmt::format("[{}]", fmt::join(value.sizes(), ", ")) : "undefined"));
  }
  if (std::ranges::any_of(metrics_, [&](const auto& metric) { return metric.first == name; })) {
    throw ConfigError(fmt::format("Loss.with: the loss has a metric '{}' already; give another name", name));
  }
  if (static_cast<int64_t>(metrics_.size()) == detail::kMostMetrics) {
    throw ConfigError(fmt::format("Loss.with: '{}' would be metric {}; a loss has at most {}", name,
                                  metrics_.size() + 1, detail::kMostMetrics));
  }
  Loss result = *this;
  result.metrics_.emplace_back(name, value.detach());
  return result;
}

int64_t Loss::count() const {
  return count_tensor_.defined() ? detail::whole_count(count_tensor_.item<double>()) : count_;
}

double detail::count_of(const Loss& loss) {
  return loss.count_tensor().defined() ? loss.count_tensor().item<double>() : static_cast<double>(loss.count());
}

int64_t detail::whole_count(double count) {
  if (!(count >= 0) || count != std::floor(count) || std::isinf(count)) {
    throw ConfigError(
        fmt::format("Loss: count is {}; it is a number of items, so a whole one, >= 0. For items with weights that add "
                    "up to something else give Loss::whole(sum / weights.sum()), with a batch that is not split",
                    count));
  }
  return static_cast<int64_t>(count);
}

}  // namespace snug
