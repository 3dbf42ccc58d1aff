#pragma once
// StepToPlan: a step before it is planned, and how it can be tried.

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "snug/accumulation/micro_batch.h"
#include "snug/step/detail/rank_split.h"

namespace snug::detail {

/// Steps of one kind save the same tensors, for batches of the same size.
struct StepKind {
  BatchShape shape = {};
  bool is_training = true;  // the model's mode
  uint32_t trained = 0;     // tells which parameters are not frozen

  friend bool operator==(const StepKind&, const StepKind&) = default;
};

/// What a step is, before it is planned.
struct StepToPlan {
  StepKind kind = {};
  int64_t batch = 0;                    // items
  int64_t micro_batch = 0;              // items in each; 0: to be chosen
  int64_t at_most = RankSplit::kWhole;  // items in each: what all ranks have agreed on
  int64_t fixed_bytes = 0;              // alive all the time: everything but gradients and activations
  int64_t state_bytes = 0;              // of those: state that the optimizer may have yet to allocate
  int64_t gradient_bytes = 0;           // of all
  int64_t optimizer_bytes = 0;          // workspace of the optimizer's part
  bool is_within_window = false;        // there are gradients of earlier micro-batches, so nothing can be tried
  /// Forward and loss of the first `items` items, as the step will run them. They are loaded by the first call, until unload().
  std::function<std::function<at::Tensor()>(int64_t items)> forward = {};
  std::function<void()> unload = {};
  /// Makes gradients, of zeros, as they are from the second micro-batch on; or drops them.
  std::function<void(bool)> hold_gradients = {};
  /// After a forward: how much of that state is of parameters that it gives no gradient to, so that it will not come.
  std::function<int64_t()> idle_state_bytes = {};
  /// After the forward: why the batch must not be cut; empty: it may.
  std::function<std::string()> pinned_by = {};
};

/// Whether a plan for steps of kind `large` serves those of kind `small`: no side of a tensor is longer, and at most a fifth is wasted.
bool covers(const StepKind& large, const StepKind& small);

}  // namespace snug::detail
