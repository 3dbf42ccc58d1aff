#pragma once
// Glow (Kingma and Dhariwal 2018): actnorm, invertible 1x1 convolution and affine coupling, in levels. The loss is a
// negative log-likelihood with the flows' log-determinants.

#include <cmath>
#include <numbers>

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

class FlowImpl : public torch::nn::Module {
 public:
  FlowImpl(int64_t channels, int64_t hidden)
      : log_scale_(register_parameter("log_scale", torch::zeros({1, channels, 1, 1}))),
        shift_(register_parameter("shift", torch::zeros({1, channels, 1, 1}))),
        mix_(register_parameter("mix", std::get<0>(torch::linalg_qr(torch::randn({channels, channels}))))) {
    using torch::nn::Conv2d;
    using torch::nn::Conv2dOptions;
    Conv2d last(Conv2dOptions(hidden, channels, 3).padding(1));
    torch::nn::init::normal_(last->weight, 0,
                             0.01);  // not zeros as in the paper, so that each parameter has a gradient
    coupling_ = register_module(
        "coupling", torch::nn::Sequential(Conv2d(Conv2dOptions(channels / 2, hidden, 3).padding(1)), torch::nn::ReLU(),
                                          Conv2d(Conv2dOptions(hidden, hidden, 1)), torch::nn::ReLU(), last));
  }

  /// The log-determinant is that of all items, per item.
  std::pair<Tensor, Tensor> forward(Tensor x) {
    const int64_t places = x.size(2) * x.size(3);
    x = (x + shift_) * torch::exp(log_scale_);
    x = torch::conv2d(x, mix_.unsqueeze(2).unsqueeze(3));
    const std::vector<Tensor> halves = x.chunk(2, 1), net = coupling_->forward(halves[0]).chunk(2, 1);
    const Tensor scale = torch::sigmoid(net[1] + 2);
    const Tensor y = (halves[1] + net[0]) * scale;
    const Tensor log_det = places * (log_scale_.sum() + std::get<1>(torch::slogdet(mix_)));
    return {torch::cat({halves[0], y}, 1), log_det + torch::log(scale).sum({1, 2, 3})};
  }

  /// So that what leaves actnorm has mean 0 and variance 1 in each channel.
  void initialise_from(const Tensor& x) {
    const torch::NoGradGuard no_grad;
    shift_.copy_(-x.mean({0, 2, 3}, /*keepdim=*/true));
    log_scale_.copy_(-torch::log(x.std({0, 2, 3}, /*unbiased=*/false, /*keepdim=*/true) + 1e-6));
  }

 private:
  Tensor log_scale_, shift_, mix_;
  torch::nn::Sequential coupling_{nullptr};
};
TORCH_MODULE(Flow);

class GlowImpl : public torch::nn::Module {
 public:
  GlowImpl(int64_t levels, int64_t flows_per_level, int64_t hidden) : flows_per_level_(flows_per_level) {
    int64_t channels = 3;
    for (int64_t level = 0; level < levels; ++level, channels /= 2) {
      channels *= 4;
      for (int64_t i = 0; i < flows_per_level; ++i) {
        flows_.push_back(register_module("flow" + std::to_string(flows_.size()), Flow(channels, hidden)));
      }
    }
  }

  /// Nats per dimension.
  Tensor loss(const Tensor& images, const Run& run) {
    Parts parts;
    for (int64_t i = 0; i < std::ssize(flows_); ++i) {
      parts.emplace_back([this, i](const State& state) { return flow(i, state); });
    }
    const State end = run(parts, {images, torch::zeros({images.size(0)})});
    return -(end[1] + log_normal(end[0])).mean() / static_cast<double>(images[0].numel());
  }

  void initialise_from(const Tensor& images) {
    const torch::NoGradGuard no_grad;
    State state{images, torch::zeros({images.size(0)})};
    for (int64_t i = 0; i < std::ssize(flows_); ++i) {
      flows_[static_cast<size_t>(i)]->initialise_from(starts_level(i) ? squeeze(state[0]) : state[0]);
      state = flow(i, state);
    }
  }

 private:
  bool starts_level(int64_t i) const { return i % flows_per_level_ == 0; }

  State flow(int64_t i, const State& state) {
    auto [x, log_det] = flows_[static_cast<size_t>(i)]->forward(starts_level(i) ? squeeze(state[0]) : state[0]);
    Tensor log_likelihood = state[1] + log_det;
    if (starts_level(i + 1) && i + 1 < std::ssize(flows_)) {  // a half of the channels goes no further
      const std::vector<Tensor> halves = x.chunk(2, 1);
      return {halves[0], log_likelihood + log_normal(halves[1])};
    }
    return {x, log_likelihood};
  }

  static Tensor squeeze(const Tensor& x) { return torch::pixel_unshuffle(x, 2); }

  static Tensor log_normal(const Tensor& x) {
    return (-0.5 * (x.square() + std::log(2 * std::numbers::pi))).sum({1, 2, 3});
  }

  int64_t flows_per_level_;
  std::vector<Flow> flows_;
};
TORCH_MODULE(Glow);

inline Entry make_glow() {
  torch::manual_seed(1);
  Glow model(/*levels=*/2, /*flows_per_level=*/8, /*hidden=*/64);
  const Tensor images = torch::rand({16, 3, 32, 32});
  model->initialise_from(images);
  return {"glow", model.ptr(), {images}, [model](const Batch& batch, const Run& run) mutable {
            return model->loss(batch[0], run);
          }};
}

}  // namespace snug::zoo
