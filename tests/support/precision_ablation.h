#pragma once
// The recipe of mixed precision, added up ingredient by ingredient on a small regression: what each is for, in numbers. Used by a test and
// by benchmarks/precision_ablation.cpp.

#include <array>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "snug/optim/sgd.h"
#include "snug/precision/grad_scaler.h"
#include "snug/precision/master_weights.h"

namespace snug::testing {

/// Each has what those before it have. All but the first compute forward and backward in FP16, with FP16 weights.
enum class Recipe { Fp32, PureFp16, Masters, Scaling, Fp32Accumulation };

inline constexpr std::array kRecipes{std::pair{Recipe::Fp32, "FP32"}, std::pair{Recipe::PureFp16, "pure FP16"},
                                     std::pair{Recipe::Masters, "+ FP32 masters"},
                                     std::pair{Recipe::Scaling, "+ loss scaling"},
                                     std::pair{Recipe::Fp32Accumulation, "+ FP32 accumulation"}};

struct AblationRun {
  std::vector<double> losses;    // of each step, of the whole batch
  double zero_gradients = 0;     // share of zeros in the last step's gradients
  double unchanged_weights = 0;  // share of weights that the last step did not move
};

/// A 16-48-48-1 MLP fits t = sin(sum x) over 512 items, in micro-batches of 8. Output and target are multiplied with c = 2^-8, so the
/// gradients are 2^-16 times what they would be: small, as those of many losses are. The learning rate makes up for it, so in exact
/// arithmetic c does not matter.
inline AblationRun train_ablation(Recipe recipe, int steps) {
  torch::manual_seed(1);
  constexpr double kC = 1.0 / 256;
  constexpr int64_t kItems = 512, kMicro = 8;
  const auto x = torch::randn({kItems, 16});
  const auto t = (x.sum(1, true) / 2).sin();
  torch::nn::Sequential model(torch::nn::Linear(16, 48), torch::nn::Tanh(), torch::nn::Linear(48, 48),
                              torch::nn::Tanh(), torch::nn::Linear(48, 1));
  const auto dtype = recipe == Recipe::Fp32 ? torch::kFloat : torch::kHalf;
  model->to(dtype);
  const auto low = model->parameters();
  MasterWeights masters(low);
  const bool has_masters = recipe >= Recipe::Masters;
  const auto updated = has_masters ? masters.parameters() : low;
  torch::optim::SGD optimizer(updated, torch::optim::SGDOptions(0.05 / (kC * kC)).momentum(0.9));
  GradScaler scaler({.init_scale = 4096, .growth_interval = 200, .enabled = recipe >= Recipe::Scaling});
  AblationRun run;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    double loss_sum = 0;
    for (int64_t begin = 0; begin < kItems; begin += kMicro) {
      const auto out = model->forward(x.slice(0, begin, begin + kMicro).to(dtype));
      const auto target = t.slice(0, begin, begin + kMicro);
      // FP16 all the way, unless the last ingredient is in.
      const auto loss_type = recipe == Recipe::Fp32Accumulation ? torch::kFloat : dtype;
      const auto loss = (out.to(loss_type) * kC - (target * kC).to(loss_type)).square().sum() / kItems;
      loss_sum += (out.detach().to(torch::kDouble) - target).square().sum().item<double>() / kItems;
      scaler.scale(loss).backward();
      if (recipe == Recipe::Fp32Accumulation) {
        masters.gather_gradients();
      }
    }
    run.losses.push_back(loss_sum);
    if (has_masters) {
      masters.gather_gradients();
    }
    std::vector<torch::Tensor> before;
    int64_t zeros = 0, elements = 0, unchanged = 0;
    for (const auto& p : updated) {
      before.push_back(p.detach().clone());
      zeros += (p.grad() == 0).sum().item<int64_t>();
      elements += p.numel();
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
