#include "snug/activations/lean_cross_entropy.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "snug/core/detail/computed_gradients.h"
#include "snug/core/error.h"

// at::cross_entropy_loss is log_softmax, then the sum of chosen elements. Rows are independent, so both run here for
// some rows at a time, with the same operators in the same order. The one or two numbers that remain of each row are
// then reduced as LibTorch reduces them.

namespace snug {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kElements = int64_t{1} << 20;  // of log-probabilities alive at once
constexpr int64_t kIgnored = -100;

void check(const at::Tensor& logits, const at::Tensor& target, const CrossEntropyOptions& options) {
  const auto shape = [](const at::Tensor& t) { return fmt::format("[{}]", fmt::join(t.sizes(), ", ")); };
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    throw ConfigError(
        fmt::format("cross_entropy: label_smoothing is {}; it must be in [0, 1]", options.label_smoothing));
  }
  if (!at::isFloatingType(logits.scalar_type()) || logits.dim() < 1 || logits.size(-1) < 1) {
    throw ConfigError(fmt::format("cross_entropy: logits are {} {}; they must be floating [..., classes]",
                                  c10::toString(logits.scalar_type()), shape(logits)));
  }
  if (target.scalar_type() != at::kLong ||
      target.sizes() != logits.sizes().slice(0, static_cast<size_t>(logits.dim() - 1))) {
    throw ConfigError(
        fmt::format("cross_entropy: target is {} {}; it must be int64 with the leading sizes of the logits {}",
                    c10::toString(target.scalar_type()), shape(target), shape(logits)));
  }
}

at::Tensor widened(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
}

/// Calls f(begin, count) for groups of rows.
template <class F>
void for_rows(const at::Tensor& logits, F&& f) {
  const int64_t rows = logits.size(0);
  const int64_t group = std::max<int64_t>(kElements / logits.size(1), 1);
  for (int64_t begin = 0; begin < rows; begin += group) {
    f(begin, std::min(group, rows - begin));
  }
}

at::Tensor plain(const at::Tensor& logits, const at::Tensor& target, const CrossEntropyOptions& options) {
  return at::cross_entropy_loss(widened(logits), target, {},
                                options.reduction == Reduction::Mean ? at::Reduction::Mean : at::Reduction::Sum,
                                options.ignore_index, options.label_smoothing);
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& target, const CrossEntropyOptions& options) {
  const bool mean = options.reduction == Reduction::Mean;
  const at::Tensor ignored = target.eq(options.ignore_index);
  const at::Tensor index = target.masked_fill(ignored, 0).unsqueeze(1);
  const auto float_type = logits.options().dtype(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor chosen = at::empty({logits.size(0), 1}, float_type);
  const at::Tensor smooth = at::zeros({options.label_smoothing > 0 ? logits.size(0) : 0}, float_type);
  for_rows(logits, [&](int64_t begin, int64_t count) {
    const at::Tensor log_softmax = at::log_softmax(widened(logits.narrow(0, begin, count)), 1);
    chosen.narrow(0, begin, count).copy_(log_softmax.gather(1, index.narrow(0, begin, count)));
    if (options.label_smoothing > 0) {
      smooth.narrow(0, begin, count).copy_(-log_softmax.sum(1));
    }
  });
  // The chosen ones are all of class 0 now.
  const at::Tensor loss = at::nll_loss(chosen, at::zeros_like(target).masked_fill_(ignored, kIgnored), {},
                                       mean ? at::Reduction::Mean : at::Reduction::Sum, kIgnored);
  if (options.label_smoothing == 0) {
    return loss;
  }
  at::Tensor uniform = smooth.masked_fill_(ignored, 0).sum();
  if (mean) {
    uniform = uniform / ignored.logical_not().sum();
  }
  return loss * (1 - options.label_smoothing) +
         uniform * (options.label_smoothing / static_cast<double>(logits.size(1)));
}

at::Tensor gradient_of(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                       const CrossEntropyOptions& options) {
  const at::Tensor ignored = target.eq(options.ignore_index).unsqueeze(1);
  const at::Tensor index = target.unsqueeze(1).masked_fill(ignored, 0);
  // The weight in the loss of each row's chosen log-probability, and of each of its log-probabilities.
  at::Tensor chosen = grad * (1 - options.label_smoothing);
  at::Tensor uniform = grad * (options.label_smoothing / static_cast<double>(logits.size(1)));
  if (options.reduction == Reduction::Mean) {
    const at::Tensor counted = ignored.logical_not().sum();
    chosen = chosen / counted;
    uniform = uniform / counted;
  }
  at::Tensor result = at::empty(logits.sizes(), logits.options());
  for_rows(logits, [&](int64_t begin, int64_t count) {
    const at::Tensor log_softmax = at::log_softmax(widened(logits.narrow(0, begin, count)), 1);
    at::Tensor of_log_softmax = at::zeros_like(log_softmax);
    if (options.label_smoothing > 0) {
      of_log_softmax -= uniform;
    }
    of_log_softmax.scatter_add_(1, index.narrow(0, begin, count), chosen.neg().expand({count, 1}));
    of_log_softmax.masked_fill_(ignored.narrow(0, begin, count), 0);
    result.narrow(0, begin, count)
        .copy_(at::_log_softmax_backward_data(of_log_softmax, log_softmax, 1, log_softmax.scalar_type()));
  });
  return result;
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& target,
                            const CrossEntropyOptions& options) {
    context->save_for_backward({logits, target});
    context->saved_data["mean"] = options.reduction == Reduction::Mean;
    context->saved_data["ignore_index"] = options.ignore_index;
    context->saved_data["label_smoothing"] = options.label_smoothing;
    return loss_of(logits, target, options);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = detail::saved_for_computing(context);
    const at::Tensor& logits = saved[0];
    const CrossEntropyOptions options{
        .reduction = context->saved_data["mean"].toBool() ? Reduction::Mean : Reduction::Sum,
        .ignore_index = context->saved_data["ignore_index"].toInt(),
        .label_smoothing = context->saved_data["label_smoothing"].toDouble()};
    if (at::GradMode::is_enabled()) {  // this backward will be differentiated, as LibTorch's operators can
      const auto gradient = torch::autograd::grad({plain(logits, saved[1], options)}, {logits}, {grads[0]},
                                                  /*retain_graph=*/true, /*create_graph=*/true);
      return {gradient.front(), at::Tensor(), at::Tensor()};
    }
    return {gradient_of(grads[0], logits, saved[1], options), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, CrossEntropyOptions options) {
  check(logits, target, options);
  return CrossEntropy::apply(logits.reshape({target.numel(), logits.size(-1)}), target.reshape({-1}), options);
}

}  // namespace snug
