#pragma once
// PixelSNAIL (Chen et al. 2018): gated residual blocks of masked convolutions, then causal attention over all pixels so
// far, beside which the image itself and the pixels' places are concatenated to the features.

#include <cmath>

#include "benchmarks/zoo/entry.h"
#include "benchmarks/zoo/pixel_cnn.h"

namespace snug::zoo {

class GatedResidualImpl : public torch::nn::Module {
 public:
  /// Takes `beside` features more than its own; 0: none.
  GatedResidualImpl(int64_t width, int64_t size, int64_t beside = 0)
      : in_(register_module("in", MaskedConv2d(width, width, size, /*sees_itself=*/true))),
        out_(register_module("out", MaskedConv2d(width, 2 * width, size, /*sees_itself=*/true))) {
    if (beside > 0) {
      beside_ = register_module("beside", MaskedConv2d(beside, width, 1, /*sees_itself=*/true));
    }
  }

  Tensor forward(const Tensor& x, const Tensor& beside = {}) {
    Tensor h = in_->forward(torch::elu(x));
    if (beside.defined()) {
      h = h + beside_->forward(torch::elu(beside));
    }
    const Tensor gated = out_->forward(torch::dropout(torch::elu(h), 0.5, is_training()));
    return x + torch::glu(gated, 1);
  }

 private:
  MaskedConv2d in_, out_, beside_{nullptr};
};
TORCH_MODULE(GatedResidual);

class SnailBlockImpl : public torch::nn::Module {
 public:
  /// seen: features of the image and of the places.
  SnailBlockImpl(int64_t residuals, int64_t width, int64_t seen, int64_t places)
      : width_(width),
        keys_(register_module("keys", torch::nn::Conv2d(width + seen, kKey + width, 1))),
        queries_(register_module("queries", torch::nn::Conv2d(width + places, kKey, 1))),
        merge_(register_module("merge", GatedResidual(width, 1, width))) {
    for (int64_t i = 0; i < residuals; ++i) {
      residuals_.push_back(register_module("residual" + std::to_string(i), GatedResidual(width, 3)));
    }
  }

  /// before: 1 where the pixel of a column comes before that of a row.
  Tensor forward(Tensor x, const Tensor& image, const Tensor& places, const Tensor& before) {
    for (GatedResidual& residual : residuals_) {
      x = residual->forward(x);
    }
    const std::vector<Tensor> heard =
        keys_->forward(torch::cat({x, image, places}, 1)).flatten(2).split_with_sizes({kKey, width_}, 1);
    const Tensor queries = queries_->forward(torch::cat({x, places}, 1)).flatten(2).transpose(1, 2);
    const Tensor scores = queries.matmul(heard[0]) / std::sqrt(static_cast<double>(kKey));
    // The first pixel attends to none.
    const Tensor weights = scores.masked_fill(before == 0, -1e9).softmax(2) * before;
    return merge_->forward(x, weights.matmul(heard[1].transpose(1, 2)).transpose(1, 2).view_as(x));
  }

 private:
  static constexpr int64_t kKey = 16;

  int64_t width_;
  std::vector<GatedResidual> residuals_;
  torch::nn::Conv2d keys_, queries_;
  GatedResidual merge_;
};
TORCH_MODULE(SnailBlock);

class PixelSnailImpl : public torch::nn::Module {
 public:
  PixelSnailImpl(int64_t blocks, int64_t width, int64_t shades)
      : shades_(shades),
        first_(register_module("first", MaskedConv2d(3, width, 3, /*sees_itself=*/false))),
        last_(register_module("last", MaskedConv2d(width, shades, 1, /*sees_itself=*/true))) {
    for (int64_t i = 0; i < blocks; ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i), SnailBlock(3, width, 3, 2)));
    }
  }

  /// images: shades as integers, square.
  Tensor loss(const Tensor& images, const Run& run) {
    const int64_t side = images.size(2);
    const Tensor image = images.unsqueeze(1).to(torch::kFloat) / static_cast<double>(shades_ - 1) - 0.5;
    const Tensor line = torch::linspace(-0.5, 0.5, side);
    const Tensor places = torch::stack(torch::meshgrid({line, line}, "ij")).expand({images.size(0), 2, side, side});
    const Tensor before = torch::ones({side * side, side * side}).tril(-1);
    Parts parts;
    for (const SnailBlock& block : blocks_) {
      parts.emplace_back(
          [=, block = block.ptr()](const State& x) { return State{block->forward(x[0], image, places, before)}; });
    }
    const Tensor h = run(parts, {first_->forward(torch::cat({image, places}, 1))})[0];
    return torch::nn::functional::cross_entropy(last_->forward(torch::elu(h)), images);
  }

 private:
  int64_t shades_;
  MaskedConv2d first_, last_;
  std::vector<SnailBlock> blocks_;
};
TORCH_MODULE(PixelSnail);

inline Entry make_pixel_snail() {
  constexpr int64_t kShades = 16;
  torch::manual_seed(1);
  PixelSnail model(/*blocks=*/4, /*width=*/32, kShades);
  const Tensor images = torch::randint(kShades, {8, 16, 16});
  return {"pixel_snail", model.ptr(), {images}, [model](const Batch& batch, const Run& run) mutable {
            return model->loss(batch[0], run);
          }};
}

}  // namespace snug::zoo
