#include "snug/sliced.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "src/remat/slice_scope.h"

namespace snug {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("[{}]", fmt::join(tensor.sizes(), ", ")) : "no tensor";
}

void check(const at::Tensor& input, const SlicedOptions& options) {
  if (!input.defined() || options.dim < -input.dim() || options.dim >= input.dim()) {
    throw ConfigError(fmt::format("sliced: there is no dimension {} in the input, {}", options.dim, shape_of(input)));
  }
  if (options.slices < 0) {
    throw ConfigError(fmt::format("sliced: slices is {}; it must be >= 0, and 0 leaves it to a plan", options.slices));
  }
  if (options.multiple < 1) {
    throw ConfigError(fmt::format("sliced: multiple is {}; it must be >= 1", options.multiple));
  }
}

int64_t slice_length(int64_t length, int64_t slices, int64_t multiple) {
  if (length <= multiple || slices >= length) {
    return std::min(length, multiple);
  }
  const int64_t equal = (length + slices - 1) / slices;
  return (equal + multiple - 1) / multiple * multiple;
}

at::Tensor checked(at::Tensor result, const at::Tensor& slice, int64_t dim) {
  if (!result.defined() || result.dim() <= dim) {
    throw ConfigError(fmt::format(
        "sliced: for a slice {} the callable returned {}, which has no dimension {} to join; sum or maximise "
        "with keepdim",
        shape_of(slice), shape_of(result), dim));
  }
  return result;
}

}  // namespace

at::Tensor sliced(const std::function<at::Tensor(at::Tensor)>& fn, const at::Tensor& input, SlicedOptions options) {
  check(input, options);
  const int64_t dim = options.dim < 0 ? options.dim + input.dim() : options.dim;
  int64_t slices = options.slices;
  if (slices == 0) {
    slices = input.size(dim) > options.multiple ? detail::SliceScope::ask() : 1;
  }
  const int64_t length = slices == 1 ? input.size(dim) : slice_length(input.size(dim), slices, options.multiple);
  if (length >= input.size(dim)) {
    return checked(fn(input), input, dim);
  }
  std::vector<at::Tensor> results;
  // split, not narrow: split's backward is one concatenation, narrow's a full-size gradient for every slice.
  for (const at::Tensor& slice : input.split(length, dim)) {
    results.push_back(checked(checkpoint(options.checkpoint, fn, slice), slice, dim));
  }
  return at::cat(results, dim);
}

}  // namespace snug
