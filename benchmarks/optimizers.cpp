// The optimizer's part of a step, on the parameters of a GPT of 6 blocks: 10.8 million in 75 tensors (d = 384), and in the cases whose names
// end in _large 42.9 million (d = 768). See script/bench.

#include <map>
#include <memory>
#include <string>
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
std::vector<Tensor> gpt_parameters(int64_t d) {
  torch::manual_seed(1);
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
auto plain_step(int64_t d, Options options) {
  return [=]() -> std::function<void()> {
    auto optimizer = std::make_shared<Optimizer>(gpt_parameters(d), options);
    return [optimizer] { optimizer->step(); };
  };
}

// Between two and a half, so that gradients are unscaled in earnest and yet stay what they are.
double next_scale(double scale) { return 1 / scale; }

// What a step under loss scaling does, without the host ever asking.
template <class Optimizer, class Options>
auto scaled_step(int64_t d, Options options, bool clip) {
  return [=]() -> std::function<void()> {
    auto parameters = gpt_parameters(d);
    auto optimizer = std::make_shared<Optimizer>(parameters, options);
    auto scaler = std::make_shared<snug::GradScaler>(snug::GradScalerOptions{.init_scale = 2});
    scaler->scale(torch::ones({}));
    return [=, scale = 2.0]() mutable {
      if (clip) {
        scaler->unscale_(*optimizer);
        snug::clip_grad_norm_(parameters, 1e6);
      }
      scaler->step(*optimizer);
      scaler->update(scale = next_scale(scale));
    };
  };
}

// The same by what LibTorch has in C++: the operator under Python's GradScaler, a norm that waits, the optimizer's single operators.
auto torch_unscale_clip_step(int64_t d) {
  return [d]() -> std::function<void()> {
    auto parameters = gpt_parameters(d);
    auto optimizer = std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-4));
    return [=, scale = 2.0]() mutable {
      const torch::NoGradGuard no_grad;
      std::vector<Tensor> gradients;
      for (const Tensor& parameter : parameters) {
        gradients.push_back(parameter.grad());
      }
      Tensor found_inf = torch::zeros({});
      torch::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, torch::full({}, 1 / scale));
      torch::nn::utils::clip_grad_norm_(parameters, 1e6);
      if (found_inf.item<float>() == 0) {
        optimizer->step();
      }
      scale = next_scale(scale);
    };
  };
}

}  // namespace

int main() {
  const snug::AdamWOptions options{.lr = 1e-4};
  const torch::optim::AdamWOptions torch_options(1e-4);
  const snug::AdamW8bitOptions options_8bit{.lr = 1e-4};
  std::map<std::string, snug::benchmarks::Prepare> cases;
  for (const auto& [d, size] : {std::pair{int64_t{384}, std::string()}, {768, "_large"}}) {
    cases["torch_adamw" + size] = plain_step<torch::optim::AdamW>(d, torch_options);
    cases["snug_adamw" + size] = plain_step<snug::AdamW>(d, options);
    cases["snug_adamw8bit" + size] = plain_step<snug::AdamW8bit>(d, options_8bit);
    cases["torch_adamw_unscale_clip" + size] = torch_unscale_clip_step(d);
    cases["snug_adamw_scaler" + size] = scaled_step<snug::AdamW>(d, options, false);
    cases["snug_adamw_unscale_clip" + size] = scaled_step<snug::AdamW>(d, options, true);
  }
  return snug::benchmarks::serve(cases);
}
