// The optimizer's part of a step, on the parameters of a GPT of 6 blocks, d = 384: 10.7 million in 75 tensors. See script/bench.

#include <memory>
#include <vector>

#include <torch/torch.h>

#include "benchmarks/serve.h"
#include "snug/optim/adamw.h"
#include "snug/optim/adamw8bit.h"
#include "snug/optim/clip.h"
#include "snug/precision/grad_scaler.h"

namespace {

using torch::Tensor;

// In the order of benchmarks/peers/optimizers.py.
std::vector<Tensor> gpt_parameters() {
  torch::manual_seed(1);
  constexpr int64_t d = 384;
  std::vector<Tensor> parameters{torch::randn({256, d}), torch::randn({256, d})};
  for (int block = 0; block < 6; ++block) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
             {d}, {d}, {3 * d, d}, {3 * d}, {d, d}, {d}, {d}, {d}, {4 * d, d}, {4 * d}, {d, 4 * d}, {d}}) {
      parameters.push_back(torch::randn(shape) * 0.02);
    }
  }
  parameters.push_back(torch::ones({d}));
  for (Tensor& parameter : parameters) {
    parameter.requires_grad_();
    parameter.mutable_grad() = torch::randn(parameter.sizes()) * 1e-3;
  }
  return parameters;
}

template <class Optimizer, class Options>
auto plain_step(Options options) {
  return [options]() -> std::function<void()> {
    auto optimizer = std::make_shared<Optimizer>(gpt_parameters(), options);
    return [optimizer] { optimizer->step(); };
  };
}

// What a step under loss scaling does, without the host ever asking. The scale is 1, so that gradients stay what they are.
template <class Optimizer, class Options>
auto scaled_step(Options options, bool clip) {
  return [options, clip]() -> std::function<void()> {
    auto parameters = gpt_parameters();
    auto optimizer = std::make_shared<Optimizer>(parameters, options);
    auto scaler =
        std::make_shared<snug::GradScaler>(snug::GradScalerOptions{.init_scale = 1, .growth_interval = 1 << 30});
    scaler->scale(torch::ones({}));
    return [=] {
      if (clip) {
        scaler->unscale_(*optimizer);
        snug::clip_grad_norm_(parameters, 1e6);
      }
      scaler->step(*optimizer);
      scaler->update();
    };
  };
}

// The same by what LibTorch has in C++: a loop over the gradients, a norm that waits, the optimizer's single operators.
std::function<void()> torch_unscale_clip_step() {
  auto parameters = gpt_parameters();
  auto optimizer = std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-4));
  return [=] {
    const torch::NoGradGuard no_grad;
    bool finite = true;
    for (const Tensor& parameter : parameters) {
      parameter.mutable_grad().mul_(1.0);
      finite = finite && torch::isfinite(parameter.grad()).all().item<bool>();
    }
    torch::nn::utils::clip_grad_norm_(parameters, 1e6);
    if (finite) {
      optimizer->step();
    }
  };
}

}  // namespace

int main() {
  const snug::AdamWOptions options{.lr = 1e-4};
  return snug::benchmarks::serve({
      {"torch_adamw", plain_step<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-4))},
      {"snug_adamw", plain_step<snug::AdamW>(options)},
      {"snug_adamw8bit", plain_step<snug::AdamW8bit>(snug::AdamW8bitOptions{.lr = 1e-4})},
      {"torch_adamw_unscale_clip", torch_unscale_clip_step},
      {"snug_adamw_scaler", scaled_step<snug::AdamW>(options, false)},
      {"snug_adamw_unscale_clip", scaled_step<snug::AdamW>(options, true)},
  });
}
