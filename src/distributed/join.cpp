#include <utility>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "src/core/computed_gradients.h"

namespace snug {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Zero times a parameter is not enough: the parameter may be infinite.
struct Nothing : torch::autograd::Function<Nothing> {
  static at::Tensor forward(AutogradContext* context, at::TensorList parameters) {
    context->save_for_backward(parameters.vec());
    return at::zeros({}, parameters.front().options().requires_grad(false));
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    variable_list zeros;
    for (const at::Tensor& parameter : detail::saved_for_computing(context)) {
      zeros.push_back(at::zeros_like(parameter));
    }
    return zeros;
  }
};

}  // namespace

Join::Join(std::shared_ptr<ProcessGroup> group, std::vector<at::Tensor> parameters)
    : group_(std::move(group)), parameters_(std::move(parameters)) {
  std::erase_if(parameters_, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
  if (group_ == nullptr || parameters_.empty()) {
    throw ConfigError("Join: the process group is null, or no parameter has gradients; give both");
  }
}

int64_t Join::next(int64_t items) {
  // A count below zero must not vanish in a sum, so the count is replaced by a large negative number. The sum over all
  // ranks does not overflow.
  const int64_t wrong = (int64_t{1} << 62) / group_->size();
  const at::Tensor total = at::full({}, items < 0 ? -wrong : items, at::kLong);
  group_->all_reduce(total);
  if (total.item<int64_t>() < 0) {
    throw ConfigError("Join.next: a rank gave less than 0 items; give 0 where there are none");
  }
  return total.item<int64_t>();
}

at::Tensor Join::nothing() const { return Nothing::apply(at::TensorList(parameters_)); }

}  // namespace snug
