#pragma once
// What tests of a Stepper on ranks have in common: their words, a rank's share of a batch, and models with all that
// trains them.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/stepper.h"
#include "tests/distributed/ranks.h"
#include "tests/step/planned_training.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug {

using ::testing::AllOf;
using testing::bytes_of;
using testing::clones_of;
using testing::close_in_norm;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using testing::squared_error;
using testing::tiny_batch;
using testing::tiny_model;

namespace testing {

/// Rank `rank`'s part of a batch for `ranks`.
inline Batch share(const Batch& batch, int rank, int ranks) {
  return batch.slice(batch.size() * rank / ranks, batch.size() * (rank + 1) / ranks);
}
inline Batch share(const Batch& batch, const ProcessGroup& group) { return share(batch, group.rank(), group.size()); }

/// Once Gloo's threads have let go of what they sent.
inline int64_t settled_live() {
  int64_t now = planned::live();
  for (int64_t before = -1; before != now; now = planned::live()) {
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return now;
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const std::vector<torch::Tensor>& parameters, const std::shared_ptr<ProcessGroup>&)>;

inline std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<torch::Tensor>& parameters,
                                                    const std::shared_ptr<ProcessGroup>& /*group*/) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
}
inline std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<torch::Tensor>& parameters,
                                                      const std::shared_ptr<ProcessGroup>& /*group*/) {
  return std::make_unique<AdamW>(parameters, AdamWOptions{.lr = 0.01});
}

/// A model with its Stepper, alone or on ranks.
struct Training {
  explicit Training(const std::shared_ptr<ProcessGroup>& of = nullptr, StepperOptions options = {},
                    torch::nn::Sequential with = tiny_model(), const MakeOptimizer& make_optimizer = sgd,
                    DataParallelOptions parallel = {})
      : group(of), model(std::move(with)) {
    if (group) {
      ddp.emplace(model, group, std::move(parallel));
      options.ranks.data_parallel = &*ddp;
    }
    optimizer = make_optimizer(model->parameters(), group);
    if (!options.budget.memory.is_unlimited()) {
      settled_live();
    }
    stepper.emplace(model, *optimizer, options);
  }

  Loss loss_of(const Batch& micro) {
    ++calls;
    const torch::Tensor output = model->forward(micro[0].to(model->parameters()[0].scalar_type()));
    if (at_backward && output.requires_grad()) {
      output.register_hook([this](const torch::Tensor& gradient) {
        std::exchange(at_backward, nullptr)();
        return gradient;
      });
    }
    return squared_error(output, micro[1]);
  }
  StepResult step(const Batch& batch) {
    return stepper->step(batch, [&](const Batch& micro) { return loss_of(micro); });
  }
  int64_t items() const { return stepper->plan()->choice.items; }
  std::vector<torch::Tensor> parameters() const { return clones_of(model->parameters()); }
  std::vector<torch::Tensor> state() const {
    auto tensors = parameters();
    for (const torch::Tensor& buffer : model->buffers()) {
      tensors.push_back(buffer.clone());
    }
    return tensors;
  }

  std::shared_ptr<ProcessGroup> group;
  torch::nn::Sequential model;
  std::optional<DataParallel> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<Stepper> stepper;
  std::function<void()> at_backward;  // called once
  int calls = 0;                      // of the loss function
};

/// On ranks, with a model that is deep enough for a plan.
struct RankedRun : Training {
  explicit RankedRun(const std::shared_ptr<ProcessGroup>& of, StepperOptions options = {},
                     torch::nn::Sequential with = planned::deep(), const MakeOptimizer& make_optimizer = adamw)
      : Training(of, options, std::move(with), make_optimizer) {}
  // `room`: bytes for what a step adds to what is alive.
  static StepperOptions with_room(int64_t room, StepperOptions options = {}) {
    const int64_t of_model = 2 * bytes_of(planned::deep()->parameters());  // its buckets too
    options.budget.memory = Bytes(settled_live() + of_model + room);
    return options;
  }
};

inline constexpr int64_t kPlenty = 1 << 26;

}  // namespace testing

using testing::share;
using testing::Training;

}  // namespace snug
