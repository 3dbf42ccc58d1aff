#pragma once
// PixelCNN (van den Oord et al. 2016) with gated residual blocks: the convolutions' weights are masked in each forward
// pass.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

class MaskedConv2dImpl : public torch::nn::Conv2dImpl {
 public:
  /// Sees the pixels above and to the left; `sees_itself`: its own as well.
  MaskedConv2dImpl(int64_t in, int64_t out, int64_t size, bool sees_itself)
      : Conv2dImpl(torch::nn::Conv2dOptions(in, out, size).padding(size / 2)),
        mask_(register_buffer("mask", torch::zeros({1, 1, size, size}))) {
    using torch::indexing::Slice;
    mask_.index_put_({0, 0, Slice(0, size / 2)}, 1);
    mask_.index_put_({0, 0, size / 2, Slice(0, size / 2 + (sees_itself ? 1 : 0))}, 1);
  }

  Tensor forward(const Tensor& x) {
    return torch::conv2d(x, weight * mask_, bias, /*stride=*/1, /*padding=*/mask_.size(2) / 2);
  }

 private:
  Tensor mask_;
};
TORCH_MODULE(MaskedConv2d);

class GatedBlockImpl : public torch::nn::Module {
 public:
  explicit GatedBlockImpl(int64_t width)
      : in_(register_module("in", MaskedConv2d(width, 2 * width, 3, /*sees_itself=*/true))),
        out_(register_module("out", MaskedConv2d(width, width, 1, /*sees_itself=*/true))) {}

  Tensor forward(const Tensor& x) {
    const std::vector<Tensor> halves = in_->forward(x).chunk(2, 1);
    return x + out_->forward(torch::tanh(halves[0]) * torch::sigmoid(halves[1]));
  }

 private:
  MaskedConv2d in_, out_;
};
TORCH_MODULE(GatedBlock);

class PixelCnnImpl : public torch::nn::Module {
 public:
  PixelCnnImpl(int64_t blocks, int64_t width, int64_t shades)
      : shades_(shades),
        first_(register_module("first", MaskedConv2d(1, width, 7, /*sees_itself=*/false))),
        last_(register_module("last", MaskedConv2d(width, shades, 1, /*sees_itself=*/true))) {
    for (int64_t i = 0; i < blocks; ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i), GatedBlock(width)));
    }
  }

  /// images: shades as integers.
  Tensor loss(const Tensor& images, const Run& run) {
    Parts parts;
    for (const GatedBlock& block : blocks_) {
      parts.emplace_back([block = block.ptr()](const State& x) { return State{block->forward(x[0])}; });
    }
    const Tensor in = images.unsqueeze(1).to(torch::kFloat) / static_cast<double>(shades_ - 1) - 0.5;
    const Tensor h = run(parts, {first_->forward(in)})[0];
    return torch::nn::functional::cross_entropy(last_->forward(torch::relu(h)), images);
  }

 private:
  int64_t shades_;
  MaskedConv2d first_, last_;
  std::vector<GatedBlock> blocks_;
};
TORCH_MODULE(PixelCnn);

inline Entry make_pixel_cnn() {
  constexpr int64_t kShades = 16;
  torch::manual_seed(1);
  PixelCnn model(/*blocks=*/10, /*width=*/32, kShades);
  const Tensor images = torch::randint(kShades, {8, 28, 28});
  return {"pixel_cnn", model.ptr(), {images}, [model](const Batch& batch, const Run& run) mutable {
            return model->loss(batch[0], run);
          }};
}

}  // namespace snug::zoo
