#pragma once
// ResNet: the residual networks for small pictures of He et al. 2015 (arXiv:1512.03385, section 4.2), with 6n + 2
// layers and BatchNorm. Like Gpt, a ResNet knows nothing of memory techniques: memory techniques come in as a block
// runner.
//
//   snug::ResNet model(snug::ResNetOptions{.depth = 20});             // 0.27 M parameters
//   torch::Tensor logits = model->forward(pictures);                  // [N, 3, H, W] -> [N, 10]

#include <cstdint>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "program/models/block_runner.h"

namespace snug {

/// The shortcut to which a block adds its branch, if the number of channels or the size of the picture changes.
enum class ResNetShortcut {
  Pad,      ///< the paper's option A: every second pixel, and zeros for the new channels; no parameters
  Project,  ///< option B: a 1 x 1 convolution and BatchNorm
};

struct ResNetOptions {
  /// Layers with weights, shortcuts not counted: 2 (stages) n + 2 for n blocks a stage, with three stages 8, 14, 20,
  /// 32, 44, 56, 110.
  int64_t depth = 20;
  /// Channels of each stage, not falling. Each stage after the first halves height and width.
  std::vector<int64_t> widths = {16, 32, 64};
  int64_t classes = 10;
  int64_t in_channels = 3;  ///< 3: colours; 1: grey
  double dropout = 0;       ///< in front of the last layer; the paper has none
  ResNetShortcut shortcut = ResNetShortcut::Pad;
};

/// relu(branch(x) + shortcut(x)): [N, in, H, W] -> [N, out, H / stride, W / stride], rounded up. All layers lie in
/// Sequentials, which batch_norm_to_group_norm reaches.
class ResNetBlockImpl : public torch::nn::Module {
 public:
  ResNetBlockImpl(int64_t in, int64_t out, int64_t stride, ResNetShortcut shortcut);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Sequential branch{nullptr};      // conv1, norm1, relu, conv2, norm2
  torch::nn::Sequential projection{nullptr};  // conv, norm; null if x is added unchanged, or padded

 private:
  int64_t new_channels_;
  int64_t stride_;
};
TORCH_MODULE(ResNetBlock);

/// Parameters: stem.{conv, norm}, blocks.I.branch.{conv1, norm1, conv2, norm2}, blocks.I.projection.{conv, norm}
/// and head, each weight (and bias, but for convolutions). Convolutions are initialised as in He et al. 2015
/// (arXiv:1502.01852, normal, fan out), from torch's default generator.
class ResNetImpl : public torch::nn::Module {
 public:
  /// Throws ConfigError for options that cannot work.
  explicit ResNetImpl(ResNetOptions options = {});

  /// [N, in_channels, H, W] -> logits [N, classes], for any H and W of at least 1. Throws ConfigError for another
  /// shape.
  torch::Tensor forward(const torch::Tensor& x);

  /// The same up to the head, averaged over the picture: [N, widths.back()].
  torch::Tensor features(const torch::Tensor& x);

  /// From now on every block is called through `runner`; after an empty `runner` the blocks are called directly again.
  void set_block_runner(BlockRunner runner);

  const ResNetOptions options;
  torch::nn::Sequential stem{nullptr};  // conv, norm, relu
  std::vector<ResNetBlock> blocks;
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  BlockRunner run_block_;
};
TORCH_MODULE(ResNet);

}  // namespace snug
