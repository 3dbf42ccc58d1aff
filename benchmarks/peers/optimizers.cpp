// The same work as benchmarks/optimizers.cpp by LibTorch alone: snug is not even loaded, whose allocator would make
// these steps faster, too.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "benchmarks/gpt_parameters.h"
#include "benchmarks/serve.h"

namespace {

using snug::benchmarks::gpt_parameters;
using snug::benchmarks::next_scale;
using torch::Tensor;

auto adamw(int64_t d) {
  return [d]() -> std::function<void()> {
    auto optimizer = std::make_shared<torch::optim::AdamW>(gpt_parameters(d), torch::optim::AdamWOptions(1e-4));
    return [optimizer] { optimizer->step(); };
  };
}

// By what LibTorch has in C++: the operator under Python's GradScaler, a norm that waits, the optimizer's single
// operators.
auto adamw_unscale_clip(int64_t d) {
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
  std::map<std::string, snug::benchmarks::Prepare> cases;
  for (const auto& [d, size] : {std::pair{int64_t{384}, std::string()}, {768, "_large"}}) {
    cases["adamw" + size] = adamw(d);
    cases["adamw_unscale_clip" + size] = adamw_unscale_clip(d);
  }
  return snug::benchmarks::serve(cases);
}
