// Steps of a small network, 64 items in 4 micro-batches, where what a Stepper does besides is a large part: by hand,
// through a Stepper, and through one with so large a budget that its plan keeps everything. See script/bench.

#include <functional>
#include <memory>

#include <torch/torch.h>

#include "benchmarks/serve.h"
#include "snug/snug.h"

namespace {

constexpr int64_t kItems = 64, kPart = 16, kWidth = 64;

struct Work {
  torch::nn::Sequential model{torch::nn::Linear(kWidth, kWidth), torch::nn::GELU(), torch::nn::Linear(kWidth, kWidth),
                              torch::nn::GELU(), torch::nn::Linear(kWidth, kWidth)};
  snug::AdamW optimizer{model->parameters(), {.lr = 1e-4}};
  torch::Tensor x = torch::randn({kItems, kWidth});
};

std::function<void()> by_hand() {
  torch::manual_seed(1);
  return [work = std::make_shared<Work>()] {
    work->optimizer.zero_grad();
    for (int64_t first = 0; first < kItems; first += kPart) {
      const torch::Tensor part = work->x.narrow(0, first, kPart);
      (work->model->forward(part).square().sum() / (kItems * kWidth)).backward();
    }
    snug::clip_grad_norm_(work->model->parameters(), 1.0);
    work->optimizer.step();
  };
}

auto stepper(const snug::StepperOptions& options) {
  return [=]() -> std::function<void()> {
    torch::manual_seed(1);
    const auto work = std::make_shared<Work>();
    const auto stepper = std::make_shared<snug::Stepper>(work->model, work->optimizer, options);
    return [=] {
      stepper->step({work->x}, [&](const snug::Batch& micro) {
        const torch::Tensor y = work->model->forward(micro[0]);
        return snug::Loss::sum(y.square().sum(), y.numel());
      });
    };
  };
}

}  // namespace

int main() {
  return snug::benchmarks::serve({
      {"by_hand", by_hand},
      {"stepper", stepper({.micro_batch = kPart, .clip_norm = 1.0})},
      {"budget", stepper({.micro_batch = kPart, .clip_norm = 1.0, .budget = {.memory = snug::Bytes(1 << 30)}})},
  });
}
