#pragma once
// StepPlan: how a Stepper keeps a budget: the number of micro-batches into which a batch is cut, and the tensors
// of each micro-batch that are kept or computed again. A StepPlan is plain data: look at it, save it beside the run,
// read it back.
//
//   if (const auto plan = stepper.plan()) std::cout << plan->explain();
//
// StepResult: what a Stepper's step did, in numbers.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/grad_scaler.h"
#include "snug/plan.h"
#include "snug/precision.h"

namespace snug {

namespace plan {
struct Solution;
}

/// The bytes of one kind, by place.
struct PlacedBytes {
  int64_t in_memory = 0;  ///< in the memory of the model's device
  int64_t outside = 0;    ///< in files; for a device, in the host's memory; of weights in shards, on other ranks

  friend bool operator==(const PlacedBytes&, const PlacedBytes&) = default;
};

/// The bytes of a step by kind, for people. At no moment are all kinds alive. Workspace, the batch and
/// small things belong to no kind.
struct BytesByKind {
  /// Weights, buffers, and the Stepper's FP32 masters. With weights outside, the window through which weights pass is
  /// in memory.
  PlacedBytes weights;
  PlacedBytes gradients;        ///< once backward has run
  PlacedBytes optimizer_state;  ///< of all trained parameters, once the state exists
  PlacedBytes activations;      ///< of a micro-batch: in memory at the peak, and outside at any time

  friend bool operator==(const BytesByKind&, const BytesByKind&) = default;
};

/// The micro-batch with which a whole step is fastest.
struct StepChoice {
  int64_t items = 0;          ///< in a micro-batch
  int64_t micro_batches = 1;  ///< in a step
  int64_t peak_bytes = 0;     ///< predicted, of everything
  double seconds = 0;         ///< predicted, of the step
  /// The plan of a micro-batch, for the library. StepPlan::activations has the numbers.
  std::shared_ptr<const plan::Solution> plan = {};

  friend bool operator==(const StepChoice& a, const StepChoice& b);
};

/// The place of a part of a training step while no operator and no update uses the part.
enum class Place : uint8_t {
  Memory,  ///< in the memory of the model's device
  File,    ///< in a file; an update or an operator brings pieces into memory
  Host,    ///< in the host's memory, for a model on another device; an operator brings weights to the device, and the
           ///< CPU makes the updates
};

/// The places of the parts of a step that may leave memory.
struct Placement {
  Place state = Place::Memory;  ///< of the optimizer's state
  Place model = Place::Memory;  ///< of weights of 64 KiB and more, of a CPU such buffers too, and of gradients

  friend bool operator==(const Placement&, const Placement&) = default;
};

struct StepPlan {
  int64_t budget_bytes = 0;  ///< BudgetOptions::memory
  /// The micro-batch, and the step's seconds and bytes. Bytes count everything: model, optimizer, batch, gradients,
  /// activations.
  StepChoice choice = {};
  int64_t slices = 1;           ///< of snug::sliced, where the model leaves the number to the plan
  Placement placement = {};     ///< the parts in memory, in files, and on the host
  std::string considered = {};  ///< a table, for people: every micro-batch that was tried, and why not chosen
  BytesByKind bytes = {};       ///< by kind and place; all 0 if an earlier version of snug made the plan
  /// Bytes beside `choice.peak_bytes` and `bytes` by which the window of weights is larger, as planned for the last
  /// step under the plan, because the budget has room: weights in files, on the host, or in shards.
  int64_t spare_bytes = 0;
  std::optional<ActivationPlan> activations = {};  ///< none: all is kept as in plain training, except in slices

  /// The file in BudgetOptions::plan_folder that an earlier program left; empty: the plan was made in this program, or
  /// read by from_json.
  std::filesystem::path read_from = {};

  /// For people: the choice, the other candidates, what is alive at the peak (also what the program itself holds), the
  /// tensors computed again, and the cost of computing again.
  std::string explain() const;

  /// Advice in a sentence. docs/fit.md has the techniques and when to use each technique.
  std::string verdict() const;

  /// The plan and everything that explain() tells.
  std::string to_json() const;
  /// Throws ConfigError for a text that is not a plan, or is a plan of another format version.
  static StepPlan from_json(std::string_view text);

 private:
  std::string verdict_on_activations() const;
};

/// The result of a step. The methods read the device when first asked.
class StepResult {
 public:
  /// Mean over all items of the batch, of all ranks. NaN without items.
  double loss() const;
  /// Mean of the metric over all items, as loss(); see Loss::with. Throws ConfigError for a name that no Loss of the
  /// step has.
  double metric(const std::string& name) const;
  /// Whether parameters were updated. false in these cases:
  /// - a gradient was not finite under loss scaling;
  /// - StepperOptions::accept_update returned false;
  /// - the batch had no items.
  bool stepped() const;
  /// 2-norm of the gradients of the optimizer's parameters, unscaled, before clipping and after before_update.
  double grad_norm() const;
  /// The loss scale of the step; 1 without scaling.
  double scale() const;
  /// With gradient_noise: 2-norm of the mean gradient of the first micro-batch alone, as grad_norm() is of all
  /// micro-batches. NaN if not measured.
  double first_grad_norm() const;

  int64_t micro_batches = 0;  ///< of this rank
  int64_t items = 0;          ///< sum of the losses' counts, over all ranks
  int64_t peak_bytes = 0;     ///< most tensor memory alive at once on the model's device, earlier tensors included
  int64_t bytes_sent = 0;     ///< of gradients, handed to all-reduce with other ranks; see DataParallel::bytes_reduced
  /// Seconds in which gradients were on their way, and the part that was not hidden behind backward; NaN with NCCL. See
  /// DataParallel::CommunicationTime.
  double communication_seconds = 0, communication_waited = 0;
  double seconds = 0;  ///< until everything was queued; on a CPU, until everything was done
  /// The rise of memory in forward and backward above the level before the step, less the bytes of all gradients: the
  /// cost of activations and workspace at the peak. The optimizer's part of the step is not counted.
  int64_t activation_peak_bytes = 0;
  /// The first operator that differed from the plan, or had larger results than planned, in words; empty: no difference
  /// was noticed.
  /// - From a different operator on, everything was kept.
  /// - Larger results are dropped and rebuilt as planned, and take more memory.
  /// - If memory does not suffice, kept results are dropped and rebuilt beyond the plan, on a CPU.
  /// - The plan stays. Exception: if the plan came from plan_folder, no step had been made under the plan, and
  ///   operators differed, the next step plans again.
  /// - Operators are not compared under a plan that keeps everything. Exception: the first step under such a plan from
  ///   plan_folder.
  std::string plan_deviation;
  /// How often the step ran out of memory, on any rank, and was repeated under a plan that takes less.
  int64_t step_downs = 0;
  /// A line for each region that the precision guard moved after this step.
  std::vector<std::string> precision_changes;
  /// Statistics of the gradients, if sample_gradients() asked for statistics.
  std::vector<GradientStatistics> gradient_statistics;
  /// Items of the first micro-batch, and of the batch of all ranks, in the batch's own items.
  int64_t first_batch_items = 0, batch_items = 0;

 private:
  friend class Stepper;
  at::Tensor loss_;
  std::map<std::string, at::Tensor> metrics_;
  at::Tensor grad_norm_;
  at::Tensor first_grad_norm_;
  at::Tensor scale_;
  GradScaler::Outcome outcome_{false};
};

}  // namespace snug
