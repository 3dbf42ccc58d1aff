#pragma once
// StepResult: what a Stepper's step did.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/precision/grad_scaler.h"
#include "snug/precision/gradient_statistics.h"

namespace snug {

/// What a step did. The methods read the device when they are first asked.
class StepResult {
 public:
  /// Mean over all items of the batch, of all ranks. NaN if there were none.
  double loss() const;
  /// Whether parameters were updated: not so if a gradient was not finite under loss scaling, or if there were no
  /// items.
  bool stepped() const;
  /// 2-norm of the gradients of the optimizer's parameters, unscaled, before clipping.
  double grad_norm() const;
  /// The loss scale that this step used; 1 without scaling.
  double scale() const;
  /// With gradient_noise: 2-norm of the mean gradient of the first micro-batch alone, as grad_norm() is of all. NaN if
  /// it was not measured.
  double first_grad_norm() const;

  int64_t micro_batches = 0;  ///< of this rank
  int64_t items = 0;          ///< sum of the losses' counts, of all ranks
  int64_t peak_bytes = 0;  ///< most tensor memory alive at once on the model's device, what was there before included
  int64_t bytes_sent = 0;  ///< of gradients, handed to all-reduce with other ranks; see DataParallel::bytes_reduced
  /// While gradients were on their way, and what of that was not hidden behind backward; NaN with NCCL. See
  /// CommunicationTime.
  double communication_seconds = 0, communication_waited = 0;
  double seconds = 0;  ///< until everything was queued; on a CPU, until it was done
  /// How far memory rose in forward and backward above its level before the step, less the bytes of all gradients: what
  /// activations and workspace cost at their peak. The optimizer's part of the step is not in it.
  int64_t activation_peak_bytes = 0;
  /// The first operator that was another than planned for, or had larger results, in words; empty: none was noticed.
  /// From another operator on everything was kept; larger results are dropped and rebuilt as planned, and take more.
  /// The plan stays, unless it came from plan_folder, no step had been made under it, and operators were others: then
  /// the next step plans anew. Operators are not compared under a plan that keeps everything, but in the first step
  /// under one from plan_folder.
  std::string plan_deviation;
  /// How often the step ran out of memory, on any rank, and was made again under a plan that takes less.
  int64_t step_downs = 0;
  /// A line for each region that precision_guard moved after this step.
  std::vector<std::string> precision_changes;
  /// Of the gradients, if sample_gradients() asked for them.
  std::vector<GradientStatistics> gradient_statistics;
  /// The first micro-batch's share of the batch, that of all ranks, in the batch's own items.
  int64_t first_batch_items = 0, batch_items = 0;

 private:
  friend class Stepper;
  at::Tensor loss_;
  at::Tensor grad_norm_;
  at::Tensor first_grad_norm_;
  at::Tensor scale_;
  StepOutcome outcome_{false};
};

}  // namespace snug
