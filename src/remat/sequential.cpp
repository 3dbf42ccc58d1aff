#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <torch/nn/modules/container/sequential.h>

#include "snug/core.h"
#include "snug/sliced.h"

namespace snug {
namespace {

using Layer = std::function<at::Tensor(at::Tensor)>;

at::Tensor run_chain(const std::vector<Layer>& layers, int64_t segments, at::Tensor input, LastSegment last) {
  const size_t n = layers.size();
  if (n == 0 || segments < 0 || segments > static_cast<int64_t>(n)) {
    throw ConfigError(
        fmt::format("checkpoint_sequential: segments is {}; with {} layers it must be between 1 and {}, "
                    "or 0 for about the square root of their number",
                    segments, n, n));
  }
  const auto root = static_cast<size_t>(std::lround(std::sqrt(static_cast<double>(n))));
  const size_t count = segments > 0 ? static_cast<size_t>(segments) : root;
  for (size_t i = 0; i < count; ++i) {
    const bool is_last = i + 1 == count;
    const auto begin = layers.begin() + static_cast<std::ptrdiff_t>(i * (n / count));
    const auto end = is_last ? layers.end() : begin + static_cast<std::ptrdiff_t>(n / count);
    const auto run = [part = std::vector<Layer>(begin, end)](at::Tensor x) {
      for (const Layer& layer : part) {
        x = layer(std::move(x));
      }
      return x;
    };
    if (is_last && last == LastSegment::Plain) {
      input = run(std::move(input));
    } else {
      input = checkpoint({.label = fmt::format("segment {} of {}", i + 1, count)}, run, std::move(input));
    }
  }
  return input;
}

}  // namespace

at::Tensor checkpoint_sequential(const std::vector<Layer>& layers, int64_t segments, at::Tensor input,
                                 LastSegment last) {
  return run_chain(layers, segments, std::move(input), last);
}

at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input, LastSegment last) {
  std::vector<Layer> functions;
  for (torch::nn::AnyModule& module : *layers) {
    functions.emplace_back([module](at::Tensor x) mutable { return module.forward(std::move(x)); });
  }
  return run_chain(functions, segments, std::move(input), last);
}

}  // namespace snug
