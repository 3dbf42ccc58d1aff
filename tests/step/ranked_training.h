#pragma once
// What tests of a Stepper on ranks have in common: their words, a rank's share of a batch, and a small model with all that trains it.

#include <optional>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/distributed/data_parallel.h"
#include "snug/step/stepper.h"
#include "tests/distributed/ranks.h"
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
  return batch_slice(batch, batch.size() * rank / ranks, batch.size() * (rank + 1) / ranks);
}
inline Batch share(const Batch& batch, const ProcessGroup& group) { return share(batch, group.rank(), group.size()); }

/// A small model with its Stepper, alone or on ranks.
struct Training {
  explicit Training(const std::shared_ptr<ProcessGroup>& group = nullptr, StepperOptions options = {},
                    DataParallelOptions parallel = {})
      : model(tiny_model()), optimizer(model->parameters(), torch::optim::SGDOptions(0.1)) {
    if (group) {
      ddp.emplace(model, group, std::move(parallel));
      options.data_parallel = &*ddp;
    }
    stepper.emplace(model, optimizer, options);
  }

  Loss loss_of(const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); }
  StepResult step(const Batch& batch) {
    return stepper->step(batch, [&](const Batch& micro) { return loss_of(micro); });
  }

  torch::nn::Sequential model;
  torch::optim::SGD optimizer;
  std::optional<DataParallel> ddp;
  std::optional<Stepper> stepper;
};

}  // namespace testing

using testing::share;
using testing::Training;

}  // namespace snug
