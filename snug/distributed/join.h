#pragma once
// Join: ranks that run out of data before the others. They go on with what all ranks must do together, and add nothing
// to it.
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
  /// `parameters`: of the model; those without gradients are passed over.
  Join(std::shared_ptr<ProcessGroup> group, std::vector<at::Tensor> parameters);

  /// To be called by every rank before each step: how many items all ranks have together for it. `items` of this rank,
  /// 0: it has run out, or has none this time. Sends 8 bytes. Throws ConfigError, on every rank, if one says less than
  /// 0.
  int64_t next(int64_t items);

  /// A loss (scalar, 0) on which all parameters have the gradient 0, whatever their values are.
  at::Tensor nothing() const;

 private:
  std::shared_ptr<ProcessGroup> group_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace snug
