#pragma once
// Data-parallel steps of K micro-batches of a GPT.
//
//   ParallelGpt gpt(init_process_group(), /*layers=*/6, /*width=*/256);
//   const double seconds = slowest_seconds(gpt.group(), [&] { gpt.step(/*micro_batches=*/4, /*loud=*/1); });

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "program/models/gpt.h"
#include "snug/distributed/data_parallel.h"
#include "snug/distributed/process_group.h"

namespace snug::measure {

/// A GPT, the same on all ranks. A micro-batch of a rank is 2 x 128 tokens.
class ParallelGpt {
 public:
  ParallelGpt(std::shared_ptr<ProcessGroup> group, int64_t layers, int64_t width, DataParallelOptions options = {});

  /// Forward and backward of `micro_batches`. The last `loud` of the micro-batches communicate.
  void step(int micro_batches, int loud);

  ProcessGroup& group() { return *group_; }
  DataParallel& data_parallel() { return *data_parallel_; }
  std::vector<at::Tensor> parameters() const { return model_->parameters(); }

 private:
  std::shared_ptr<ProcessGroup> group_;
  Gpt model_{nullptr};
  at::Tensor tokens_;
  std::unique_ptr<DataParallel> data_parallel_;
};

/// Seconds of `work` on the slowest rank. All ranks begin together.
double slowest_seconds(ProcessGroup& group, const std::function<void()>& work);

}  // namespace snug::measure
