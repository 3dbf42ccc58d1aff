#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/precision.h"
#include "src/memory/weight_window.h"
#include "src/memory/weights_on_host.h"
#include "src/precision/low_precision.h"

namespace snug {
namespace {

using detail::is_low;

at::Tensor fp32_copy(const at::Tensor& tensor) {
  const auto options = tensor.options().dtype(at::kFloat);
  return at::empty_like(tensor, options, at::MemoryFormat::Preserve).copy_(tensor);
}

// The master of a weight on the host is on the host too.
at::Tensor master_of(const at::Tensor& low) {
  const at::Tensor at_home = detail::values_at_home(low);
  return at_home.defined() ? detail::made_on_host(at_home, at::kFloat, low.device()) : fp32_copy(low);
}

// Repeated rows of a sparse gradient, as in an embedding's gradient, are summed in FP32.
at::Tensor fp32_gradient(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.to(at::kFloat).coalesce() : fp32_copy(gradient);
}

}  // namespace

MasterWeights::MasterWeights(std::vector<at::Tensor> low) : low_(std::move(low)) {
  std::unordered_set<const void*> seen;
  std::erase_if(low_, [&](const at::Tensor& p) { return !seen.insert(p.unsafeGetTensorImpl()).second; });
  if (low_.empty()) {
    throw ConfigError("MasterWeights: there are no parameters; was the model built before?");
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < low_.size(); ++i) {
    if (!low_[i].is_floating_point()) {
      throw ConfigError(fmt::format("MasterWeights: parameter {} is {}; only floating-point parameters can be trained",
                                    i, c10::toString(low_[i].scalar_type())));
    }
    masters_.push_back(is_low(low_[i]) ? master_of(low_[i]).requires_grad_(low_[i].requires_grad()) : low_[i]);
  }
}

void MasterWeights::gather_gradients() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < low_.size(); ++i) {
    const at::Tensor gradient = low_[i].grad();
    if (!is_low(low_[i]) || !gradient.defined()) {
      continue;
    }
    at::Tensor& sum = masters_[i].mutable_grad();
    if (!sum.defined()) {
      sum = fp32_gradient(gradient);
    } else if (sum.is_sparse()) {
      sum = gradient.is_sparse() ? (sum + fp32_gradient(gradient)).coalesce() : fp32_gradient(gradient).add_(sum);
    } else if (gradient.is_sparse()) {
      sum.add_(fp32_gradient(gradient));
    } else {
      sum.add_(gradient);
    }
    low_[i].mutable_grad().reset();
  }
}

void MasterWeights::scatter() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> to, from;
  for (size_t i = 0; i < low_.size(); ++i) {
    if (is_low(low_[i])) {
      to.push_back(low_[i]);
      from.push_back(masters_[i]);
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

}  // namespace snug
