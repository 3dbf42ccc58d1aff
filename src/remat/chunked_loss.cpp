#include "snug/chunked_loss.h"

#include <vector>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "snug/checkpoint.h"
#include "snug/core.h"

namespace snug {
namespace {

void check(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
           const ChunkedLossOptions& options) {
  const auto shape = [](const at::Tensor& t) { return fmt::format("[{}]", fmt::join(t.sizes(), ", ")); };
  if (options.chunk < 1) {
    throw ConfigError(fmt::format("chunked_cross_entropy: chunk is {}; it must be >= 1", options.chunk));
  }
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    throw ConfigError(
        fmt::format("chunked_cross_entropy: label_smoothing is {}; it must be in [0, 1]", options.label_smoothing));
  }
  if (hidden.dim() < 1 || weight.dim() != 2 || hidden.size(-1) != weight.size(1)) {
    throw ConfigError(
        fmt::format("chunked_cross_entropy: hidden {} and weight {} do not fit; they must be [..., width] and "
                    "[vocabulary, width]",
                    shape(hidden), shape(weight)));
  }
  if (target.scalar_type() != at::kLong ||
      target.sizes() != hidden.sizes().slice(0, static_cast<size_t>(hidden.dim() - 1))) {
    throw ConfigError(
        fmt::format("chunked_cross_entropy: target is {} {}; it must be int64 with the leading sizes of hidden {}",
                    c10::toString(target.scalar_type()), shape(target), shape(hidden)));
  }
  if (options.bias.defined() && (options.bias.dim() != 1 || options.bias.size(0) != weight.size(0))) {
    throw ConfigError(
        fmt::format("chunked_cross_entropy: bias is {}; it must be [{}]", shape(options.bias), weight.size(0)));
  }
}

}  // namespace

at::Tensor chunked_cross_entropy(at::Tensor hidden, at::Tensor weight, at::Tensor target, ChunkedLossOptions options) {
  check(hidden, weight, target, options);
  const auto sum_of_rows = [ignore = options.ignore_index, smoothing = options.label_smoothing](
                               const at::Tensor& rows, const at::Tensor& w, const at::Tensor& t,
                               const at::Tensor& bias) {
    at::Tensor logits = at::linear(rows, w, bias.defined() ? std::optional(bias) : std::nullopt);
    if (logits.scalar_type() == at::kBFloat16 || logits.scalar_type() == at::kHalf) {
      logits = logits.to(at::kFloat);
    }
    return at::cross_entropy_loss(logits, t, {}, at::Reduction::Sum, ignore, smoothing);
  };
  // split, not narrow: split's backward is one concatenation, narrow's a full-size gradient for every chunk.
  const auto rows = hidden.reshape({-1, hidden.size(-1)}).split(options.chunk);
  const auto targets = target.reshape({-1}).split(options.chunk);
  at::Tensor sum;
  for (size_t i = 0; i < rows.size(); ++i) {
    const at::Tensor part =
        checkpoint({.label = "chunked_cross_entropy"}, sum_of_rows, rows[i], weight, targets[i], options.bias);
    sum = sum.defined() ? sum + part : part;
  }
  if (options.reduction == Reduction::Mean) {
    sum = sum / target.ne(options.ignore_index).sum();
  }
  return sum;
}

}  // namespace snug
