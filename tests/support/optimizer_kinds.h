#pragma once
// snug's optimizers whose state may lie elsewhere, each with the types of parameters that it takes, and a training of
// one.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/grad_scaler.h"
#include "snug/sgd.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

namespace snug::testing {

struct Kind {
  std::string name;
  torch::ScalarType dtype;
  std::function<std::unique_ptr<FusedOptimizer>(const std::vector<torch::Tensor>&)> make;
};

template <class Optimizer, class Options>
Kind kind(std::string name, Options options, torch::ScalarType dtype = torch::kFloat) {
  return {std::move(name), dtype, [options](const std::vector<torch::Tensor>& parameters) {
            return std::make_unique<Optimizer>(parameters, options);
          }};
}

inline std::vector<Kind> kinds() {
  return {kind<AdamW>("AdamW", AdamWOptions{.lr = 0.01, .weight_decay = 0.1}),
          kind<AdamW>("AdamWInFp64", AdamWOptions{.lr = 0.01}, torch::kDouble),
          kind<AdamW>("AdamWWithMasters", AdamWOptions{.lr = 0.01, .master_weights = true}, torch::kBFloat16),
          kind<AdamW>("AdamWWithFp16Masters", AdamWOptions{.lr = 0.01, .master_weights = true}, torch::kHalf),
          kind<AdamW>("AdamWRoundingAtRandom", AdamWOptions{.lr = 0.01, .stochastic_rounding = true}, torch::kBFloat16),
          kind<Adam>("Adam", AdamOptions{.lr = 0.01, .weight_decay = 0.1}),
          kind<SGD>("SGD", SGDOptions{.lr = 0.01}),
          kind<SGD>("SGDWithMomentum", SGDOptions{.lr = 0.01, .momentum = 0.9, .nesterov = true}),
          kind<SGD>("SGDWithDampening", SGDOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.5}),
          kind<AdamW8bit>("AdamW8bit", AdamW8bitOptions{.lr = 0.01}),
          kind<AdamW8bit>("AdamW8bitInBf16", AdamW8bitOptions{.lr = 0.01, .split_weights = true}, torch::kBFloat16)};
}

// Cut ones and small ones, a scalar, one without elements, and one whose memory is not in the order of its dimensions.
inline std::vector<torch::Tensor> parameters_for(const Kind& kind, c10::Device device = torch::kCPU) {
  torch::manual_seed(3);
  std::vector<torch::Tensor> parameters{torch::randn({100'003}), torch::randn({7}),   torch::randn({3, 33'000}),
                                        torch::randn({}),        torch::randn({0}),   torch::randn({64, 65}),
                                        torch::randn({64}),      torch::randn({4097})};
  if (kind.name.rfind("AdamW8bit", 0) != 0) {
    parameters.push_back(torch::randn({4, 32, 20, 21}).contiguous(torch::MemoryFormat::ChannelsLast));
  }
  for (torch::Tensor& parameter : parameters) {
    parameter = parameter.to(kind.dtype).to(device).requires_grad_();
  }
  return parameters;
}

// Of parameters on the device. What it hands out is on the CPU.
struct Training {
  std::vector<torch::Tensor> parameters;
  std::unique_ptr<FusedOptimizer> optimizer;

  explicit Training(const Kind& kind, c10::Device device = torch::kCPU)
      : parameters(parameters_for(kind, device)), optimizer(kind.make(parameters)) {}
  Training(const Kind& kind, const StatePlacement& place, c10::Device device = torch::kCPU) : Training(kind, device) {
    optimizer->keep_state_in(place);
  }

  void steps(uint64_t first, uint64_t last) { train(*optimizer, parameters, first, last); }
  // Five steps, of which a scaler skips the first and the fourth.
  void scaled_steps() {
    GradScaler scaler({.init_scale = 1024});
    scaler.scale(torch::ones({}, parameters[0].device()));
    for (const uint64_t step : {1, 2, 3, 4, 5}) {
      set_gradients(parameters, step, 1024);
      if (step == 1 || step == 4) {
        parameters[2].mutable_grad().view({-1})[5] = std::numeric_limits<double>::infinity();
      }
      scaler.step(*optimizer);
      scaler.update();
    }
  }
  // Parameters and state.
  std::vector<torch::Tensor> all() const {
    auto tensors = clones_of(parameters);
    const auto state = tensors_in(optimizer->state_dict());
    tensors.insert(tensors.end(), state.begin(), state.end());
    for (torch::Tensor& tensor : tensors) {
      tensor = tensor.cpu();
    }
    return tensors;
  }
};

}  // namespace snug::testing
