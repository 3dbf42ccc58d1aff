// The optimizer's part of a step, on the parameters of a GPT of 6 blocks: 10.8 million in 75 tensors (d = 384), and in
// the cases whose names end in _large 42.9 million (d = 768). See script/bench.

#include <map>
#include <memory>
#include <string>

#include <torch/torch.h>

#include "benchmarks/device.h"
#include "benchmarks/gpt_parameters.h"
#include "benchmarks/serve.h"
#include "program/measure/measure.h"
#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/grad_scaler.h"

namespace {

using snug::benchmarks::gpt_parameters;
using snug::benchmarks::next_scale;

std::vector<torch::Tensor> in_type(std::vector<torch::Tensor> parameters, torch::ScalarType dtype) {
  for (torch::Tensor& parameter : parameters) {
    const torch::Tensor gradient = parameter.grad().to(dtype);
    parameter = parameter.detach().to(dtype).requires_grad_();
    parameter.mutable_grad() = gradient;
  }
  return parameters;
}

template <class Optimizer, class Options>
auto plain_step(int64_t d, Options options, c10::Device device, torch::ScalarType dtype = torch::kFloat) {
  return [=]() -> std::function<void()> {
    auto optimizer = std::make_shared<Optimizer>(in_type(gpt_parameters(d, device), dtype), options);
    return [optimizer] { optimizer->step(); };
  };
}

// A step under loss scaling. The host never waits for a value of the device.
template <class Optimizer, class Options>
auto scaled_step(int64_t d, Options options, bool clip, c10::Device device) {
  return [=]() -> std::function<void()> {
    auto parameters = gpt_parameters(d, device);
    auto optimizer = std::make_shared<Optimizer>(parameters, options);
    auto scaler = std::make_shared<snug::GradScaler>(snug::GradScalerOptions{.init_scale = 2});
    scaler->scale(torch::ones({}, device));
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

}  // namespace

int main(int argc, char** argv) {
  const c10::Device device = snug::benchmarks::take_device(argc, argv);
  const snug::AdamWOptions options{.lr = 1e-4};
  const snug::AdamW8bitOptions options_8bit{.lr = 1e-4};
  std::map<std::string, snug::benchmarks::Prepare> cases;
  for (const auto& [d, size] : {std::pair{int64_t{384}, std::string()}, {768, "_large"}}) {
    cases["snug_adamw" + size] = plain_step<snug::AdamW>(d, options, device);
    cases["snug_adamw8bit" + size] = plain_step<snug::AdamW8bit>(d, options_8bit, device);
    cases["snug_adamw8bit_bf16" + size] = plain_step<snug::AdamW8bit>(
        d, snug::AdamW8bitOptions{.lr = 1e-4, .split_weights = true}, device, torch::kBFloat16);
    cases["snug_masters" + size] =
        plain_step<snug::AdamW>(d, snug::AdamWOptions{.lr = 1e-4, .master_weights = true}, device, torch::kBFloat16);
    cases["snug_adamw_scaler" + size] = scaled_step<snug::AdamW>(d, options, false, device);
    cases["snug_adamw_unscale_clip" + size] = scaled_step<snug::AdamW>(d, options, true, device);
  }
  return snug::benchmarks::serve(cases, [device] { snug::measure::wait_for(device); });
}
