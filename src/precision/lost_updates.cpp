#include "src/precision/lost_updates.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {

LostUpdates::LostUpdates(const std::vector<std::pair<std::string, at::Tensor>>& named_parameters,
                         c10::ScalarType dtype) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    throw ConfigError(
        fmt::format("LostUpdates: dtype is {}; give the 16-bit type, kHalf or kBFloat16", c10::toString(dtype)));
  }
  for (const auto& [name, parameter] : named_parameters) {
    if (parameter.grad().defined()) {
      parameters_.push_back(parameter);
      before_.push_back(parameter.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true));
    }
  }
}

void LostUpdates::add_to(std::vector<GradientStatistics>& statistics) const {
  if (statistics.size() != parameters_.size()) {
    throw ConfigError(
        fmt::format("LostUpdates.add_to: there are {} statistics and {} parameters; give those of the same",
                    statistics.size(), parameters_.size()));
  }
  if (parameters_.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> counts;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.grad().defined()) {
      throw ConfigError(
          fmt::format("LostUpdates.add_to: '{}' has no gradient any more; call it before gradients are dropped",
                      statistics[i].name));
    }
    const at::Tensor gradient = parameter.grad().is_sparse() ? parameter.grad().to_dense() : parameter.grad();
    const at::Tensor asked = gradient != 0;
    const at::Tensor stayed = (parameter.to(before_[i].scalar_type()) == before_[i]).logical_and(asked);
    counts.push_back(at::stack({stayed.sum(), asked.sum()}));
  }
  const at::Tensor table = at::stack(counts).cpu();
  const auto rows = table.accessor<int64_t, 2>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto row = rows[static_cast<int64_t>(i)];
    statistics[i].lost_updates = row[1] == 0 ? 0 : static_cast<double>(row[0]) / static_cast<double>(row[1]);
  }
}

}  // namespace snug::detail
