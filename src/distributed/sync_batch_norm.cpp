#include "snug/distributed/sync_batch_norm.h"

#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "snug/core.h"
#include "src/accumulation/replace_batch_norm.h"
#include "src/core/computed_gradients.h"

// Forward is torch's kernel for evaluation mode, with the mean and variance of all ranks. The part of backward that
// treats mean and variance as constants is also a kernel of torch. The backward kernel's sums for weight and bias are
// the values that the rest of backward needs from each rank.

namespace snug {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < input.dim(); ++d) {
    dims.push_back(d);
  }
  return dims;
}

// Statistics of all ranks, by channel, in FP64.
struct StatisticsOfAll {
  Tensor mean, variance;  // the variance with n in the denominator
  Tensor count;           // a number on the input's device, which the host need not know
};

StatisticsOfAll statistics_of_all(const Tensor& input, ProcessGroup& group) {
  const int64_t channels = input.size(1);
  const auto count = static_cast<double>(input.numel() / channels);
  Tensor own = at::zeros({2, channels}, input.options().dtype(at::kDouble));
  if (count > 0) {
    const auto as = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto [variance, mean] = at::var_mean(input.to(as), all_but_channels(input), /*correction=*/0);
    own = at::stack({mean, variance}).to(at::kDouble);
  }
  const Tensor all = group.all_gather(at::cat({own.flatten(), at::full({1}, count, own.options())}));
  const Tensor counts = all.select(1, 2 * channels).unsqueeze(1);
  const Tensor means = all.slice(1, 0, channels);
  const Tensor variances = all.slice(1, channels, 2 * channels);
  StatisticsOfAll result;
  result.count = counts.sum();
  result.mean = (means * counts).sum(0) / result.count;
  result.variance = ((variances + (means - result.mean).square()) * counts).sum(0) / result.count;
  return result;
}

using MaybeTensor = std::optional<Tensor>;

// The graph may live longer than the module.
struct KeptGroup : torch::CustomClassHolder {
  explicit KeptGroup(std::shared_ptr<ProcessGroup> with) : group(std::move(with)) {}
  std::shared_ptr<ProcessGroup> group;
};

struct Normalize : torch::autograd::Function<Normalize> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const MaybeTensor& weight,
                        const MaybeTensor& bias, const Tensor& mean, const Tensor& variance, const Tensor& count,
                        double eps, const std::shared_ptr<ProcessGroup>& group) {
    context->saved_data["eps"] = eps;
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<KeptGroup>(group));
    context->save_for_backward({input, weight.value_or(Tensor()), mean, variance, count});
    if (input.numel() == 0) {
      return at::empty_like(input);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::AutoGradMode in_graph(true);  // a checkpointed region makes values of the graph again
    return std::get<0>(at::native_batch_norm(input, weight, bias, mean, variance, /*training=*/false, 0.0, eps));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = detail::saved_for_computing(context);
    const Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3], &count = saved[4];
    const double eps = context->saved_data["eps"].toDouble();
    const auto kept = context->saved_data["group"].toCapsule();
    ProcessGroup& group = *static_cast<const KeptGroup&>(*kept).group;
    const int64_t channels = input.size(1);

    Tensor d_input = at::empty_like(input);
    Tensor d_weight = at::zeros({channels}, mean.options());
    Tensor d_bias = at::zeros({channels}, mean.options());
    if (input.numel() > 0) {
      std::tie(d_input, d_weight, d_bias) =
          at::native_batch_norm_backward(gradients[0].contiguous(input.suggest_memory_format()), input, weight, mean,
                                         variance, {}, {}, /*train=*/false, eps, {true, true, true});
    }
    // With y = (x - mean) * inverse: d x gets - inverse * weight * (sum of d + y * sum of d * y) / n, over all ranks.
    const Tensor sums = at::stack({d_weight, d_bias}).to(at::kDouble);
    group.all_reduce(sums);
    const Tensor inverse = (variance.to(at::kDouble) + eps).rsqrt();
    const Tensor scale = weight.defined() ? inverse * weight.to(at::kDouble) : inverse;
    const Tensor slope = -scale * inverse * sums[0] / count;
    const Tensor level = -scale * sums[1] / count - slope * mean.to(at::kDouble);
    if (input.numel() > 0) {
      std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
      shape[1] = channels;
      d_input.add_(level.to(d_input.scalar_type()).view(shape));
      d_input.addcmul_(input, slope.to(d_input.scalar_type()).view(shape));
    }
    return {d_input, weight.defined() ? d_weight : Tensor(), weight.defined() ? d_bias : Tensor(), {}, {}, {}, {}, {}};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(torch::nn::BatchNormOptions with, std::shared_ptr<ProcessGroup> group)
    : torch::nn::BatchNorm2dImpl(with), group_(std::move(group)) {
  if (group_ == nullptr) {
    throw ConfigError("SyncBatchNorm: the process group is null; give what init_process_group() returned");
  }
}

void SyncBatchNormImpl::_check_input_dim(const Tensor& input) {
  if (input.dim() < 2 || input.dim() > 5 || input.size(1) != options.num_features()) {
    throw ConfigError(
        fmt::format("SyncBatchNorm.forward: the input is [{}]; give [N, {}], or with 1 to 3 dimensions more",
                    fmt::join(input.sizes(), ", "), options.num_features()));
  }
}

Tensor SyncBatchNormImpl::forward(const Tensor& input) {
  if (!is_training() || group_->size() == 1) {
    return torch::nn::BatchNorm2dImpl::forward(input);
  }
  _check_input_dim(input);
  StatisticsOfAll all;
  {
    const torch::NoGradGuard no_grad;
    all = statistics_of_all(input, *group_);
    // With fewer than 2 values here, the host waits for the device to know all values.
    if (const bool is_enough = input.numel() >= 2 * input.size(1); !is_enough && all.count.item<double>() < 2) {
      throw ConfigError(fmt::format(
          "SyncBatchNorm.forward: all {} ranks together have {} values per channel; give at least 2 to train on",
          group_->size(), all.count.item<double>()));
    }
    if (num_batches_tracked.defined()) {
      num_batches_tracked.add_(1);
      const double pace = options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
      const Tensor unbiased = all.variance * (all.count / (all.count - 1));
      running_mean.mul_(1 - pace).add_(all.mean.to(running_mean.scalar_type()), pace);
      running_var.mul_(1 - pace).add_(unbiased.to(running_var.scalar_type()), pace);
    }
  }
  const auto dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto maybe = [](const Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : MaybeTensor(); };
  return Normalize::apply(input, maybe(weight), maybe(bias), all.mean.to(dtype), all.variance.to(dtype), all.count,
                          options.eps(), group_);
}

std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module,
                                                 const std::shared_ptr<ProcessGroup>& group) {
  const auto places = detail::places_of_batch_norms(module, "convert_sync_batch_norm");
  if (const auto* place = detail::first_held_elsewhere(places)) {
    throw ConfigError(fmt::format(
        "convert_sync_batch_norm: '{0}' is held by a member or variable besides its module's list of children, which "
        "would go on using it; let go of the variable, or write in its module `snug::SyncBatchNorm {1}{{nullptr}};` "
        "and `{1} = register_module(\"{1}\", snug::SyncBatchNorm(torch::nn::BatchNormOptions({2}), group));`",
        place->path, place->name, place->layer.options->num_features()));
  }
  std::unordered_map<const torch::nn::Module*, SyncBatchNorm> made;  // a layer in two modules stays a single layer
  std::vector<std::string> names;
  for (const auto& place : places) {
    const auto& old = place.layer;
    SyncBatchNorm norm(*old.options, group);
    norm->parameters_["weight"] = norm->weight = *old.weight;  // the very tensors: an optimizer may hold them
    norm->parameters_["bias"] = norm->bias = *old.bias;
    if (old.running_mean->defined()) {
      norm->running_mean.set_data(*old.running_mean);
      norm->running_var.set_data(*old.running_var);
      norm->num_batches_tracked.set_data(*old.num_batches_tracked);
    }
    norm->train(old.module->is_training());
    made.try_emplace(old.module, norm);
    names.push_back(place.path);
  }
  for (const auto& place : places) {
    const auto& norm = made.at(place.layer.module);
    detail::put_in_place(place, norm.ptr(), torch::nn::AnyModule(norm));
  }
  return names;
}

}  // namespace snug
