#pragma once
// The recipe of mixed precision, added up ingredient by ingredient on a small regression: what each is for, in numbers.
// Used by a test and by benchmarks/precision_ablation.cpp.

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/grad_scaler.h"
#include "snug/precision.h"
#include "snug/sgd.h"

namespace snug::testing {

struct Recipe {
  const char* name;
  c10::ScalarType dtype = torch::kHalf;  // of forward and backward, and of the weights unless there is autocast
  bool masters = false;                  // the optimizer steps on FP32 copies of the weights
  bool scaling = false;                  // of the loss
  bool fp32_accumulation = false;        // the loss is FP32, and so is the sum of the micro-batches' gradients
  bool autocast = false;                 // the weights are FP32, and so are their gradients; operators cast
};

inline constexpr Recipe kFp32{.name = "FP32", .dtype = torch::kFloat};
inline constexpr Recipe kPureFp16{.name = "pure FP16"};
inline constexpr Recipe kMasters{.name = "+ FP32 masters", .masters = true};
inline constexpr Recipe kScaling{.name = "+ loss scaling", .masters = true, .scaling = true};
inline constexpr Recipe kAccumulation{
    .name = "+ FP32 accumulation", .masters = true, .scaling = true, .fp32_accumulation = true};
inline constexpr Recipe kAutocast{.name = "FP16 autocast, scaling", .scaling = true, .autocast = true};
inline constexpr Recipe kPureBf16{.name = "pure BF16", .dtype = torch::kBFloat16};
inline constexpr Recipe kBf16Masters{
    .name = "BF16, masters, FP32 acc.", .dtype = torch::kBFloat16, .masters = true, .fp32_accumulation = true};
inline constexpr Recipe kBf16Autocast{.name = "BF16 autocast", .dtype = torch::kBFloat16, .autocast = true};
inline constexpr std::array kRecipes{kFp32,     kPureFp16, kMasters,     kScaling,     kAccumulation,
                                     kAutocast, kPureBf16, kBf16Masters, kBf16Autocast};

struct AblationRun {
  std::vector<double> losses;    // of each step, of the whole batch
  double gradient_error = 0;     // of the first step: norm of the difference from FP64, by the norm of that
  double zero_gradients = 0;     // share of zeros in the last step's gradients
  double unchanged_weights = 0;  // share of weights that the last step did not move
};

inline torch::nn::Sequential ablation_model() {
  return torch::nn::Sequential(torch::nn::Linear(16, 48), torch::nn::Tanh(), torch::nn::Linear(48, 48),
                               torch::nn::Tanh(), torch::nn::Linear(48, 1));
}

/// The loss of some of the items: output and target are multiplied with c = 2^-8, so the gradients are 2^-16 times what
/// they would be: small, as those of many losses are. The learning rate makes up for it, so in exact arithmetic c does
/// not matter.
inline constexpr double kAblationC = 1.0 / 256;
inline torch::Tensor ablation_loss(const torch::Tensor& out, const torch::Tensor& target, double items) {
  return (out * kAblationC - (target * kAblationC).to(out.scalar_type())).square().sum() / items;
}

/// How far `gradients` are from those that FP64 gives for the same weights.
inline double ablation_gradient_error(const std::vector<torch::Tensor>& weights,
                                      const std::vector<torch::Tensor>& gradients, const torch::Tensor& x,
                                      const torch::Tensor& t) {
  auto exact = ablation_model();
  exact->to(x.device(), torch::kDouble);
  double error = 0, norm = 0;
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < weights.size(); ++i) {
      exact->parameters()[i].copy_(weights[i]);
    }
  }
  ablation_loss(exact->forward(x.to(torch::kDouble)), t, static_cast<double>(x.size(0))).backward();
  for (size_t i = 0; i < weights.size(); ++i) {
    const torch::Tensor g = exact->parameters()[i].grad();
    error += (gradients[i].to(torch::kDouble) - g).square().sum().item<double>();
    norm += g.square().sum().item<double>();
  }
  return std::sqrt(error / norm);
}

/// A 16-48-48-1 MLP fits t = sin(sum x) over 512 items, in micro-batches.
inline AblationRun train_ablation(const Recipe& recipe, int steps, c10::DeviceType device = torch::kCPU,
                                  int64_t micro_batch = 8) {
  torch::manual_seed(1);
  constexpr int64_t kItems = 512;
  const auto x = torch::randn({kItems, 16}).to(device);
  const auto t = (x.sum(1, true) / 2).sin();
  auto model = ablation_model();
  const auto weights_type = recipe.autocast ? torch::kFloat : recipe.dtype;
  model->to(device, weights_type);
  const auto weights = model->parameters();
  MasterWeights masters(weights);  // FP32 weights are their own masters
  const auto updated = recipe.masters ? masters.parameters() : weights;
  torch::optim::SGD optimizer(updated, torch::optim::SGDOptions(0.05 / (kAblationC * kAblationC)).momentum(0.9));
  GradScaler scaler({.init_scale = 4096, .growth_interval = 200, .enabled = recipe.scaling});
  AblationRun run;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    double loss_sum = 0;
    for (int64_t begin = 0; begin < kItems; begin += micro_batch) {
      std::optional<Autocast> autocast;
      if (recipe.autocast) {
        autocast.emplace(device, recipe.dtype, AutocastOptions{.fp32_reductions = true});
      }
      auto out = model->forward(x.slice(0, begin, begin + micro_batch).to(weights_type));
      const auto target = t.slice(0, begin, begin + micro_batch);
      if (recipe.fp32_accumulation || recipe.autocast) {
        out = out.to(torch::kFloat);
      }
      const auto loss = ablation_loss(out, target, kItems);
      autocast.reset();
      loss_sum += (out.detach().to(torch::kDouble) - target).square().sum().item<double>() / kItems;
      scaler.scale(loss).backward();
      if (recipe.fp32_accumulation) {
        masters.gather_gradients();
      }
    }
    run.losses.push_back(loss_sum);
    if (recipe.masters) {
      masters.gather_gradients();
    }
    scaler.unscale_(optimizer);
    std::vector<torch::Tensor> before, gradients;
    int64_t zeros = 0, elements = 0, unchanged = 0;
    for (const auto& p : updated) {
      before.push_back(p.detach().clone());
      gradients.push_back(p.grad());
      zeros += (p.grad() == 0).sum().item<int64_t>();
      elements += p.numel();
    }
    if (step == 0) {
      run.gradient_error = ablation_gradient_error(weights, gradients, x, t);
    }
    if (scaler.step(optimizer)) {
      masters.scatter();
    }
    scaler.update();
    for (size_t i = 0; i < before.size(); ++i) {
      unchanged += (before[i] == updated[i]).sum().item<int64_t>();
    }
    run.zero_gradients = static_cast<double>(zeros) / static_cast<double>(elements);
    run.unchanged_weights = static_cast<double>(unchanged) / static_cast<double>(elements);
  }
  return run;
}

}  // namespace snug::testing
