#include "snug/activations/sequential.h"

#include <utility>

#include <fmt/format.h>
#include <torch/nn/modules/container/sequential.h>

#include "snug/activations/checkpoint.h"
#include "snug/core/error.h"

namespace snug {

using Layer = std::function<at::Tensor(at::Tensor)>;

at::Tensor checkpoint_sequential(const std::vector<Layer>& layers, int64_t segments, at::Tensor input,
                                 LastSegment last) {
  const auto n = static_cast<int64_t>(layers.size());
  if (segments < 1 || segments > n) {
    throw ConfigError(fmt::format("checkpoint_sequential: segments is {}; with {} layers it must be between 1 and {}",
                                  segments, n, n));
  }
  const int64_t length = n / segments;
  for (int64_t segment = 0; segment < segments; ++segment) {
    const bool is_last = segment == segments - 1;
    const auto begin = layers.begin() + segment * length;
    const auto run = [part = std::vector<Layer>(begin, is_last ? layers.end() : begin + length)](at::Tensor x) {
      for (const Layer& layer : part) {
        x = layer(std::move(x));
      }
      return x;
    };
    if (is_last && last == LastSegment::Plain) {
      input = run(std::move(input));
    } else {
      input = checkpoint({.label = fmt::format("segment {} of {}", segment + 1, segments)}, run, std::move(input));
    }
  }
  return input;
}

at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input, LastSegment last) {
  std::vector<Layer> functions;
  for (torch::nn::AnyModule& module : *layers) {
    functions.emplace_back([module](at::Tensor x) mutable { return module.forward(std::move(x)); });
  }
  return checkpoint_sequential(functions, segments, std::move(input), last);
}

}  // namespace snug
