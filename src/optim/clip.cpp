#include "snug/clip.h"

#include <map>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_memory.h"
#include "src/core/lazy_values.h"
#include "src/optim/clip_over_ranks.h"

namespace snug {
namespace {

using Lists = std::map<std::pair<std::string, c10::ScalarType>, std::vector<at::Tensor>>;

Lists gradient_lists(const std::vector<at::Tensor>& parameters) {
  Lists lists;
  std::unordered_set<const void*> seen;  // parameters() names the parameters of a shared module once for each use
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) {
      continue;
    }
    detail::resolved_gradient(parameter);
    if (parameter.grad().is_sparse() && !parameter.grad().is_coalesced()) {
      parameter.mutable_grad() = parameter.grad().coalesce();  // the norm needs the sums over repeated rows
    }
    const at::Tensor gradient = parameter.grad().is_sparse() ? parameter.grad()._values() : parameter.grad();
    // An empty tensor adds nothing, and torch has no infinity norm of an empty tensor.
    if (gradient.numel() > 0 && seen.insert(parameter.grad().unsafeGetTensorImpl()).second) {
      lists[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient);
    }
  }
  return lists;
}

// A norm of 16-bit gradients is often beyond the range of FP16, and clipping by an infinite norm makes all gradients 0.
std::vector<at::Tensor> norms_of(at::TensorList gradients, double norm_type, c10::ScalarType type) {
  const bool is_low = type == at::kHalf || type == at::kBFloat16;
  return at::_foreach_norm(gradients, norm_type, is_low ? std::optional(at::kFloat) : std::nullopt);
}

at::Tensor norm_of(const Lists& lists, double norm_type) {
  if (!(norm_type > 0)) {
    throw ConfigError(fmt::format("clip_grad_norm_: norm_type is {}; it must be > 0", norm_type));
  }
  if (lists.empty()) {
    return at::zeros({}, at::kFloat);
  }
  const at::Device device = lists.begin()->second.front().device();
  std::vector<at::Tensor> norms;
  for (const auto& entry : lists) {
    detail::for_each_in_files(entry.second, [&](at::TensorList gradients) {
      for (const at::Tensor& norm : norms_of(gradients, norm_type, entry.first.second)) {
        norms.push_back(norm.to(device, /*non_blocking=*/true));
      }
    });
  }
  return at::linalg_vector_norm(at::stack(norms), norm_type);  // in FP64 if a norm is FP64
}

void check(double max_norm) {
  if (!(max_norm >= 0)) {
    throw ConfigError(fmt::format("clip_grad_norm_: max_norm is {}; it must be >= 0", max_norm));
  }
}

void scale(const Lists& lists, double max_norm, const at::Tensor& norm) {
  // Python divides a number by a tensor as below, with two roundings.
  const at::Tensor coefficient = ((norm + 1e-6).reciprocal() * max_norm).clamp_max(1.0);
  // If the coefficient is already on the host and is 1, the pass over the gradients is left out.
  if (coefficient.is_cpu() && coefficient.item<double>() == 1.0) {
    return;
  }
  for (const auto& entry : lists) {
    const at::Tensor factor = coefficient.to(entry.second.front().device(), /*non_blocking=*/true);
    detail::for_each_in_files(entry.second, [&](at::TensorList gradients) { at::_foreach_mul_(gradients, factor); });
  }
}

}  // namespace

at::Tensor detail::clip_over_ranks(const std::vector<at::Tensor>& parameters, double max_norm,
                                   const std::function<bool(const at::Tensor&)>& counts_here,
                                   const std::function<void(const at::Tensor&)>& sum_over_ranks) {
  const at::NoGradGuard no_grad;
  const Lists gradients = gradient_lists(parameters);
  const auto count = static_cast<int64_t>(parameters.size());
  // In FP64, which has each FP32 number, the sum of a norm and of zeros is the norm.
  const at::Tensor numbers = at::zeros({2, count}, at::kDouble);
  std::unordered_set<const void*> seen;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& parameter = parameters[static_cast<size_t>(i)];
    if (seen.insert(parameter.unsafeGetTensorImpl()).second && parameter.grad().defined() && parameter.numel() > 0 &&
        counts_here(parameter)) {
      numbers[0][i] = norms_of({parameter.grad()}, 2.0, parameter.scalar_type()).front();
      numbers[1][i] = 1;
    }
  }
  sum_over_ranks(numbers);
  Lists norms;
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[1][i].item<double>() > 0) {
      const at::Tensor& parameter = parameters[static_cast<size_t>(i)];
      const auto type = parameter.scalar_type();
      norms[{parameter.device().str(), type}].push_back(numbers[0][i].to(type == at::kDouble ? type : at::kFloat));
    }
  }
  std::vector<at::Tensor> in_order;
  for (const auto& [kind, some] : norms) {
    in_order.insert(in_order.end(), some.begin(), some.end());
  }
  const at::Tensor norm = in_order.empty() ? at::zeros({}, at::kFloat) : at::linalg_vector_norm(at::stack(in_order), 2);
  if (max_norm > 0) {
    scale(gradients, max_norm, norm);
  }
  return norm;
}

at::Tensor grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  const at::NoGradGuard no_grad;
  return norm_of(gradient_lists(parameters), norm_type);
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  check(max_norm);
  const at::NoGradGuard no_grad;
  const Lists lists = gradient_lists(parameters);
  const at::Tensor norm = norm_of(lists, norm_type);
  scale(lists, max_norm, norm);
  return norm;
}

}  // namespace snug
