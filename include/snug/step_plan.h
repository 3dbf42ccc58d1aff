#pragma once
// StepPlan: what a Stepper made of its memory_budget: into how many micro-batches it cuts a batch, and what of each it
// keeps and what it computes again. Plain data: look at it, save it beside the run, read it back.
//
//   if (const auto plan = stepper.plan()) std::cout << plan->explain();
//
// StepResult: what a Stepper's step did.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/grad_scaler.h"
#include "snug/plan.h"
#include "snug/planner.h"
#include "snug/precision.h"

namespace snug {

/// How many bytes of one kind are where.
struct PlacedBytes {
  int64_t in_memory = 0;  ///< of the model's device
  int64_t outside = 0;    ///< in files; of a device's activations, in pinned memory of the host

  friend bool operator==(const PlacedBytes&, const PlacedBytes&) = default;
};

/// The bytes of a step by kind, for people: at no moment are all of them there. Workspace, the batch and small things
/// are in none of them.
struct BytesByKind {
  /// Buffers and the Stepper's FP32 masters, too. With weights outside: the window through which they pass is in
  /// memory.
  PlacedBytes weights;
  PlacedBytes gradients;        ///< once backward has run
  PlacedBytes optimizer_state;  ///< of all parameters that are trained, once there is one
  PlacedBytes activations;      ///< of a micro-batch: in memory at its peak, and outside at any time

  friend bool operator==(const BytesByKind&, const BytesByKind&) = default;
};

struct StepPlan {
  int64_t budget_bytes = 0;  ///< memory_budget
  /// The micro-batch, and what the step takes in seconds and bytes. Bytes are of everything: model, optimizer, batch,
  /// gradients, activations.
  StepChoice choice = {};
  int64_t slices = 1;           ///< into which snug::sliced cuts, where the model leaves it to the plan
  bool state_in_file = false;   ///< the optimizer's, and not in memory
  bool model_in_file = false;   ///< weights, large buffers and gradients, likewise
  std::string considered = {};  ///< a table, for people: every micro-batch that was tried, and why not
  BytesByKind bytes = {};       ///< and where they are; all 0 where an earlier version of snug made the plan
  std::optional<ActivationPlan> activations = {};  ///< none: all is kept, but in slices, as in plain training

  /// The file in StepperOptions::plan_folder that an earlier program left; empty: it was made here, or read by
  /// from_json.
  std::filesystem::path read_from = {};

  /// For people: the choice, what else was considered, what is alive at the peak, what is computed again and what that
  /// costs.
  std::string explain() const;

  /// What to do, in a sentence. docs/fit.md has the techniques and when to use them.
  std::string verdict() const;

  /// The plan and everything that explain() tells.
  std::string to_json() const;
  /// Throws ConfigError for what is not a plan, or is one of another format version.
  static StepPlan from_json(std::string_view text);

 private:
  std::string verdict_on_activations() const;
};

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
