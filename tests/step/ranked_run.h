#pragma once
// A rank's model with its Stepper, of which some allocation may fail; and what ranks ask each other.

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "snug/optim/adamw.h"
#include "tests/step/planned_training.h"
#include "tests/step/ranked_training.h"

namespace snug::testing {

using torch::Tensor;

constexpr int64_t kPlenty = 1 << 26;

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>& parameters,
                                                                             const std::shared_ptr<ProcessGroup>&)>;

inline std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<Tensor>& parameters,
                                                      const std::shared_ptr<ProcessGroup>& /*group*/) {
  return std::make_unique<AdamW>(parameters, AdamWOptions{.lr = 0.01});
}

// Once Gloo's threads have let go of what they sent.
inline int64_t settled_live() {
  int64_t now = planned::live();
  for (int64_t before = -1; before != now; now = planned::live()) {
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return now;
}

struct RankedRun {
  explicit RankedRun(const std::shared_ptr<ProcessGroup>& of, StepperOptions options = {},
                     torch::nn::Sequential with = planned::deep(), const MakeOptimizer& make_optimizer = adamw)
      : group(of), model(std::move(with)), ddp(model, of), optimizer(make_optimizer(model->parameters(), of)) {
    options.data_parallel = &ddp;
    if (!options.memory_budget.is_unlimited()) {
      settled_live();
    }
    stepper.emplace(model, *optimizer, options);
  }
  // `room`: bytes for what a step adds to what is alive.
  static StepperOptions with_room(int64_t room, StepperOptions options = {}) {
    const int64_t of_model = 2 * bytes_of(planned::deep()->parameters());  // its buckets too
    options.memory_budget = Bytes(settled_live() + of_model + room);
    return options;
  }

  StepResult step(const Batch& own) {
    return stepper->step(own, [this](const Batch& micro) {
      const Tensor input = micro[0].to(model->parameters()[0].scalar_type());
      const Tensor output = model->forward(input).to(torch::kFloat);
      if (at_backward && output.requires_grad()) {
        output.register_hook([this](const Tensor& gradient) {
          std::exchange(at_backward, nullptr)();
          return gradient;
        });
      }
      return Loss::sum((output - micro[1]).pow(2).sum(), micro[1].numel());
    });
  }
  int64_t items() const { return stepper->plan()->choice.items; }
  std::vector<Tensor> parameters() const { return clones_of(model->parameters()); }
  std::vector<Tensor> state() const {
    auto tensors = parameters();
    for (const Tensor& buffer : model->buffers()) {
      tensors.push_back(buffer.clone());
    }
    return tensors;
  }

  std::shared_ptr<ProcessGroup> group;
  torch::nn::Sequential model;
  DataParallel ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<Stepper> stepper;
  std::function<void()> at_backward;  // called once
};

inline std::vector<int64_t> of_all_ranks(ProcessGroup& group, int64_t own) {
  const Tensor all = group.all_gather(torch::full({1}, own, torch::kLong)).flatten();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}
inline bool is_same_on_all(ProcessGroup& group, int64_t own) {
  const auto all = of_all_ranks(group, own);
  return std::all_of(all.begin(), all.end(), [&](int64_t value) { return value == own; });
}

}  // namespace snug::testing
