#pragma once
// WGAN with gradient penalty (Gulrajani et al. 2017): the critic's step, whose loss has a derivative in it.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

class CriticImpl : public torch::nn::Module {
 public:
  explicit CriticImpl(int64_t width) {
    int64_t in = 3;
    for (const int64_t out : {width, 2 * width, 4 * width}) {
      layers_->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 5).stride(2).padding(2)));
      layers_->push_back(torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)));
      in = out;
    }
    layers_->push_back(torch::nn::Flatten());
    layers_->push_back(torch::nn::Linear(in * 4 * 4, 1));
    register_module("layers", layers_);
  }

  Tensor forward(const Tensor& images) { return layers_->forward(images); }

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(Critic);

class GeneratorImpl : public torch::nn::Module {
 public:
  explicit GeneratorImpl(int64_t width) : width_(width) {
    using torch::nn::ConvTranspose2dOptions;
    int64_t in = 4 * width;
    for (const int64_t out : {2 * width, width, int64_t{3}}) {
      layers_->push_back(torch::nn::ReLU());
      layers_->push_back(torch::nn::ConvTranspose2d(ConvTranspose2dOptions(in, out, 4).stride(2).padding(1)));
      in = out;
    }
    register_module("layers", layers_);
  }

  Tensor forward(const Tensor& noise) {
    return torch::tanh(layers_->forward(from_noise_->forward(noise).view({-1, 4 * width_, 4, 4})));
  }

  static constexpr int64_t kNoise = 64;

 private:
  int64_t width_;
  torch::nn::Linear from_noise_ = register_module("from_noise", torch::nn::Linear(kNoise, 4 * width_ * 4 * 4));
  torch::nn::Sequential layers_;
};
TORCH_MODULE(Generator);

inline Tensor critic_loss(Critic& critic, Generator& generator, const Tensor& real) {
  Tensor fake;
  {
    const torch::NoGradGuard no_grad;
    fake = generator->forward(torch::randn({real.size(0), GeneratorImpl::kNoise}));
  }
  const Tensor weights = torch::rand({real.size(0), 1, 1, 1});
  const Tensor between = (weights * real + (1 - weights) * fake).requires_grad_(true);
  const Tensor slopes = torch::autograd::grad({critic->forward(between).sum()}, {between}, /*grad_outputs=*/{},
                                              /*retain_graph=*/true, /*create_graph=*/true)[0];
  const Tensor penalty = (slopes.flatten(1).norm(2, 1) - 1).square().mean();
  return critic->forward(fake).mean() - critic->forward(real).mean() + 10 * penalty;
}

inline Entry make_wgan() {
  constexpr int64_t kImages = 32;
  torch::manual_seed(1);
  Critic critic(/*width=*/48);
  Generator generator(/*width=*/48);
  return {
      "wgan",
      critic.ptr(),
      {torch::rand({kImages, 3, 32, 32}) * 2 - 1},
      [critic, generator](const Batch& batch, const Run&) mutable { return critic_loss(critic, generator, batch[0]); }};
}

}  // namespace snug::zoo
