#pragma once
// StepToPlan: a step before planning. TrialRunner: how the step can be tried.

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "snug/accumulation.h"
#include "snug/step_plan.h"
#include "src/remat/effect_journal.h"
#include "src/step/step_ranks.h"

namespace torch::nn {
class Module;
}

namespace snug::detail {

struct PrecisionRegions;

/// Steps of one kind save the same tensors, for batches of the same size.
struct StepKind {
  Batch::Shape shape = {};
  uint32_t modes = 0;    // a hash: the modules in training mode, and the regions in FP32
  uint32_t trained = 0;  // a hash: the parameters that are not frozen

  friend bool operator==(const StepKind&, const StepKind&) = default;
};

/// StepKind::modes. `regions`: null if no region can be moved.
uint32_t modes_of(const torch::nn::Module& model, const PrecisionRegions* regions);

/// Runs the micro-batches of a step before the step itself.
class TrialRunner {
 public:
  virtual ~TrialRunner() = default;

  /// Loads the first `items` items, until unload(). `to_measure`: for a part into which the step does not cut the
  /// batch.
  virtual void load(int64_t items, bool to_measure = false) = 0;
  virtual void unload() = 0;
  /// Forward and loss of the loaded items, as the step will run both.
  virtual at::Tensor loss() = 0;
  /// true: makes gradients, of zeros, as from the second micro-batch on. false: drops the gradients.
  virtual void hold_gradients(bool held) = 0;
  /// After a loss: the part of the step's state_bytes for parameters to which no loss gives a gradient. The optimizer
  /// will not allocate the part.
  virtual int64_t idle_state_bytes() const = 0;
  /// After a loss: why the batch must not be cut; empty: the batch may be cut.
  virtual std::string pinned_by() const = 0;
  /// Moves each part of the step to the part's place. No effect on parts that cannot leave. `spare`: bytes for a larger
  /// window, if weights pass through a window; returns how many of the bytes the window takes. Throws as an allocation
  /// does.
  virtual int64_t put(Placement /*placement*/, int64_t /*spare*/ = 0) { return 0; }
  /// The step's bytes under a placement; activations are not counted.
  virtual BytesByKind bytes(Placement /*placement*/) const { return {}; }
  /// See StepRanks::explain_shards.
  virtual std::string explain_shards() const { return {}; }
  /// The present StepCounts::fixed_bytes, without copies in the journal. No items are loaded, and no gradients are
  /// held.
  virtual int64_t fixed_bytes() const = 0;
  /// The step's journal, which takes back the changes of trials.
  virtual EffectJournal& journal() = 0;
  /// The description for which plans hold: see describe_stepper.
  virtual std::string described() const = 0;
};

/// The place outside of a device's memory, for parts of a step.
inline Place place_outside(c10::Device device) { return device.is_cpu() ? Place::File : Place::Host; }

/// The bytes of a part of a step in a file or on the host, instead of in the device's memory. Zeros: the part cannot
/// leave memory.
struct PartInFile {
  int64_t moved = 0;      ///< not in memory any more
  int64_t beside = 0;     ///< in memory all the time instead: a window, and tensors too small for a file
  int64_t workspace = 0;  ///< in memory during an update instead of the workspace of an update in memory

  bool can_leave() const { return moved > 0; }
  int64_t saved() const { return moved - beside; }

  friend bool operator==(const PartInFile&, const PartInFile&) = default;
};

/// The bytes of a step beside activations and items, by the time in which the bytes are in memory.
struct StepMemory {
  int64_t fixed = 0;      ///< all the time
  int64_t gradients = 0;  ///< during the update, and between micro-batches
  int64_t workspace = 0;  ///< during the update

  int64_t in_update() const { return fixed + gradients + workspace; }
};

/// Bytes and items for which a plan is made.
struct StepCounts {
  int64_t batch = 0;                    ///< items
  int64_t at_most = RankSplit::kWhole;  ///< items in a micro-batch, as agreed by all ranks
  int64_t fixed_bytes = 0;              ///< alive all the time: everything but gradients and activations
  int64_t gradient_bytes = 0;           ///< of all gradients
  int64_t optimizer_bytes = 0;          ///< workspace of the optimizer's part
  PartInFile state_in_file = {};        ///< the optimizer's state in a file, or on the host, instead
  PartInFile model_in_file = {};        ///< weights, large buffers and gradients in files instead

  // Counts that trials show:
  int64_t effect_bytes = 0;      ///< copies of memory that the step writes outside of itself
  int64_t kept_bytes = 0;        ///< results that the program keeps until the next step, in profiles: see ProfiledStep
  int64_t idle_state_bytes = 0;  ///< state of parameters without a gradient, not in fixed_bytes
  int64_t left_free = 0;         ///< left free since a step, or a plan that was tried, ran out of memory

  /// The step's memory under a placement, activations and items aside. Idle state is counted in no place.
  StepMemory memory(Placement placement) const;
};

/// A step before planning.
struct StepToPlan {
  TrialRunner& trial;
  StepKind kind = {};
  StepCounts counts = {};
  int64_t micro_batch = 0;        // items in each micro-batch; 0: to be chosen
  int64_t state_bytes = 0;        // of fixed_bytes: state that the optimizer may have yet to allocate
  bool is_within_window = false;  // whether gradients of earlier micro-batches exist
};

/// Whether a plan for steps of kind `large` serves steps of kind `small`: no side of a tensor is longer, and at most a
/// fifth is wasted.
bool covers(const StepKind& large, const StepKind& small);

/// How many times as large as the `items` of a planned micro-batch the items are that `step` runs at once under the
/// plan. The answer is the largest ratio of the elements of a tensor. `is_cut`: the plan has several micro-batches.
/// Empty: the steps differ in more than sizes, or the plan does not cut the batch and the batch has more items.
std::optional<double> growth(const StepKind& planned, int64_t items, bool is_cut, const StepToPlan& step);

/// So many plans are made for steps that differ in sizes alone. Later steps take one of the plans.
inline constexpr int kPlansOfLikeSteps = 2;

/// The entry of `all` whose step is the smallest that is no smaller than another step, or else the largest. `growth_of`
/// tells how many times as large the other step is; empty: the entry is for another kind of step. Null if fewer than
/// kPlansOfLikeSteps entries have a growth.
template <typename All, typename GrowthOf>
auto closest(All& all, const GrowthOf& growth_of) {
  decltype(&*all.begin()) found = nullptr;
  double least = 0;
  int alike = 0;
  for (auto& one : all) {
    const std::optional<double> growth = growth_of(one);
    alike += growth ? 1 : 0;
    if (growth && (found == nullptr || (*growth <= 1 ? *growth > least || least > 1 : *growth < least))) {
      found = &one;
      least = *growth;
    }
  }
  return alike < kPlansOfLikeSteps ? nullptr : found;
}

}  // namespace snug::detail
