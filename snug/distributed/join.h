#pragma once
// Join: for ranks that run out of data before the others. They continue to take part in all joint operations, and add
// nothing to the results.
//
//   snug::Join join(group, model->parameters());
//   snug::DataParallel ddp(model, group, {.reduction = snug::Reduction::Sum});
//   for (;;) {
//     const std::optional<Batch> batch = loader.next();
//     const int64_t items = join.next(batch ? batch->size : 0);          // of all ranks
//     if (items == 0) break;                                             // no rank has any left
//     auto loss = ddp.forward([&] { return batch ? sum_of_losses(model, *batch) / items : join.nothing(); });
//     loss.backward();                                                   // the gradient of the mean over all items
//     optimizer.step();
//   }

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/distributed/process_group.h"

namespace snug {

/// With SyncBatchNorm a rank without data must run the model all the same, on an empty batch.
class Join final {
 public:
  /// `parameters`: the model's. Those without gradients are skipped.
  Join(std::shared_ptr<ProcessGroup> group, std::vector<at::Tensor> parameters);

  /// Every rank must call it before each step. `items`: this rank's number of items in the step; 0 if it has run out or
  /// has none this time. Returns the number of items of all ranks. Sends 8 bytes. Throws ConfigError, on every rank, if
  /// a rank gives less than 0.
  int64_t next(int64_t items);

  /// A loss (scalar, 0) on which all parameters have the gradient 0, whatever their values are.
  at::Tensor nothing() const;

 private:
  std::shared_ptr<ProcessGroup> group_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace snug
