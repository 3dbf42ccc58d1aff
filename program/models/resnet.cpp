#include "program/models/resnet.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/slice.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>

#include "snug/core.h"

namespace snug {
namespace {

using torch::Tensor;

// Throws unless the options can work; returns the blocks of a stage.
int64_t check(const ResNetOptions& options) {
  const auto& widths = options.widths;
  if (widths.empty() || widths.front() < 1 || !std::is_sorted(widths.begin(), widths.end())) {
    throw ConfigError(
        fmt::format("ResNet: widths are [{}]; give each stage's channels, at least 1 and not falling, such as "
                    "[16, 32, 64]",
                    fmt::join(widths, ", ")));
  }
  const auto layers = 2 * static_cast<int64_t>(widths.size());
  if (options.depth < layers + 2 || (options.depth - 2) % layers != 0) {
    throw ConfigError(fmt::format("ResNet: depth is {}; with {} stages give {}n + 2: {}, {}, {}, ...", options.depth,
                                  widths.size(), layers, layers + 2, 2 * layers + 2, 3 * layers + 2));
  }
  if (options.classes < 1 || options.in_channels < 1) {
    throw ConfigError(fmt::format("ResNet: classes is {} and in_channels is {}; give at least 1", options.classes,
                                  options.in_channels));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw ConfigError(fmt::format("ResNet: dropout is {}; give one from 0 to below 1", options.dropout));
  }
  return (options.depth - 2) / layers;
}

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t size, int64_t stride) {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
  torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
  return conv;
}

}  // namespace

ResNetBlockImpl::ResNetBlockImpl(int64_t in, int64_t out, int64_t stride, ResNetShortcut shortcut)
    : new_channels_(out - in), stride_(stride) {
  branch = register_module("branch", torch::nn::Sequential({{"conv1", convolution(in, out, 3, stride)},
                                                            {"norm1", torch::nn::BatchNorm2d(out)},
                                                            {"relu", torch::nn::ReLU()},
                                                            {"conv2", convolution(out, out, 3, 1)},
                                                            {"norm2", torch::nn::BatchNorm2d(out)}}));
  const bool same_shape = in == out && stride == 1;
  if (shortcut == ResNetShortcut::Project && !same_shape) {
    projection = register_module("projection", torch::nn::Sequential({{"conv", convolution(in, out, 1, stride)},
                                                                      {"norm", torch::nn::BatchNorm2d(out)}}));
  }
}

Tensor ResNetBlockImpl::forward(const Tensor& x) {
  Tensor kept = x;
  if (!projection.is_empty()) {
    kept = projection->forward(x);
  } else {
    if (stride_ > 1) {
      kept = kept.slice(2, 0, std::nullopt, stride_).slice(3, 0, std::nullopt, stride_);
    }
    if (new_channels_ > 0) {
      kept = at::constant_pad_nd(kept, {0, 0, 0, 0, 0, new_channels_});
    }
  }
  return at::relu(branch->forward(x) + kept);
}

ResNetImpl::ResNetImpl(ResNetOptions with) : options(std::move(with)) {
  const int64_t blocks_per_stage = check(options);
  int64_t width = options.widths.front();
  stem = register_module("stem", torch::nn::Sequential({{"conv", convolution(options.in_channels, width, 3, 1)},
                                                        {"norm", torch::nn::BatchNorm2d(width)},
                                                        {"relu", torch::nn::ReLU()}}));
  const auto list = register_module("blocks", torch::nn::ModuleList());
  for (size_t stage = 0; stage < options.widths.size(); ++stage) {
    for (int64_t i = 0; i < blocks_per_stage; ++i) {
      const int64_t stride = stage > 0 && i == 0 ? 2 : 1;
      blocks.emplace_back(width, options.widths[stage], stride, options.shortcut);
      list->push_back(blocks.back());
      width = options.widths[stage];
    }
  }
  dropout = register_module("dropout", torch::nn::Dropout(options.dropout));
  head = register_module("head", torch::nn::Linear(width, options.classes));
}

void ResNetImpl::set_block_runner(BlockRunner runner) { run_block_ = std::move(runner); }

Tensor ResNetImpl::forward(const Tensor& x) { return head->forward(dropout->forward(features(x))); }

Tensor ResNetImpl::features(const Tensor& x) {
  if (x.dim() != 4 || x.size(1) != options.in_channels || x.numel() == 0) {
    throw ConfigError(fmt::format("ResNet.forward: pictures are [{}]; give [N, {}, height, width]",
                                  fmt::join(x.sizes(), ", "), options.in_channels));
  }
  Tensor h = stem->forward(x);
  for (ResNetBlock& block : blocks) {
    // By value: the runner may call `run` again after this function has returned.
    const auto run = [block = block.ptr()](Tensor t) { return block->forward(t); };
    h = run_block_ ? run_block_(run, std::move(h)) : run(std::move(h));
  }
  return h.mean({2, 3});
}

}  // namespace snug
