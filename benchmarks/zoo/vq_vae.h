#pragma once
// VQ-VAE (van den Oord et al. 2017): between encoder and decoder each place becomes the nearest code, through which
// gradients go straight.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

class ResidualBlockImpl : public torch::nn::Module {
 public:
  explicit ResidualBlockImpl(int64_t width)
      : layers_(register_module(
            "layers", torch::nn::Sequential(
                          torch::nn::ReLU(), torch::nn::Conv2d(torch::nn::Conv2dOptions(width, width, 3).padding(1)),
                          torch::nn::ReLU(), torch::nn::Conv2d(torch::nn::Conv2dOptions(width, width, 1))))) {}

  Tensor forward(const Tensor& x) { return x + layers_->forward(x); }

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(ResidualBlock);

class VqVaeImpl : public torch::nn::Module {
 public:
  VqVaeImpl(int64_t width, int64_t codes, int64_t code_width)
      : encoder_(register_module("encoder", encoder(width, code_width))),
        decoder_(register_module("decoder", decoder(width, code_width))),
        codes_(register_module("codes", torch::nn::Embedding(codes, code_width))) {}

  Tensor loss(const Tensor& images) {
    const Tensor encoded = encoder_->forward(images).permute({0, 2, 3, 1}).contiguous();  // codes last
    const Tensor nearest = torch::cdist(encoded.flatten(0, 2), codes_->weight).argmin(1);
    const Tensor quantized = codes_->forward(nearest).view_as(encoded);
    const Tensor code_loss = torch::mse_loss(quantized, encoded.detach());
    const Tensor commitment = torch::mse_loss(encoded, quantized.detach());
    const Tensor straight_through = encoded + (quantized - encoded).detach();
    const Tensor decoded = decoder_->forward(straight_through.permute({0, 3, 1, 2}));
    return torch::mse_loss(decoded, images) + code_loss + 0.25 * commitment;
  }

 private:
  static torch::nn::Sequential encoder(int64_t width, int64_t code_width) {
    using torch::nn::Conv2d;
    using torch::nn::Conv2dOptions;
    return torch::nn::Sequential(Conv2d(Conv2dOptions(3, width / 2, 4).stride(2).padding(1)), torch::nn::ReLU(),
                                 Conv2d(Conv2dOptions(width / 2, width, 4).stride(2).padding(1)), ResidualBlock(width),
                                 ResidualBlock(width), torch::nn::ReLU(), Conv2d(Conv2dOptions(width, code_width, 1)));
  }

  static torch::nn::Sequential decoder(int64_t width, int64_t code_width) {
    using torch::nn::ConvTranspose2d;
    using torch::nn::ConvTranspose2dOptions;
    return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(code_width, width, 3).padding(1)),
                                 ResidualBlock(width), ResidualBlock(width), torch::nn::ReLU(),
                                 ConvTranspose2d(ConvTranspose2dOptions(width, width / 2, 4).stride(2).padding(1)),
                                 torch::nn::ReLU(),
                                 ConvTranspose2d(ConvTranspose2dOptions(width / 2, 3, 4).stride(2).padding(1)));
  }

  torch::nn::Sequential encoder_, decoder_;
  torch::nn::Embedding codes_;
};
TORCH_MODULE(VqVae);

inline Entry make_vq_vae() {
  torch::manual_seed(1);
  VqVae model(/*width=*/64, /*codes=*/256, /*code_width=*/32);
  return {"vq_vae", model.ptr(), {torch::rand({24, 3, 64, 64})}, [model](const Batch& batch, const Run&) mutable {
            return model->loss(batch[0]);
          }};
}

}  // namespace snug::zoo
