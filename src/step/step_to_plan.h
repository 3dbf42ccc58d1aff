#pragma once
// StepToPlan: a step before it is planned. StepTrial: how it can be tried.

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "snug/accumulation.h"
#include "snug/stateful_optimizer.h"
#include "snug/step_plan.h"
#include "src/remat/effect_journal.h"
#include "src/step/rank_verdict.h"

namespace torch::nn {
class Module;
}

namespace snug::detail {

struct PrecisionRegions;

/// Steps of one kind save the same tensors, for batches of the same size.
struct StepKind {
  BatchShape shape = {};
  uint32_t modes = 0;    // a hash: which modules are in training mode, which regions are in FP32
  uint32_t trained = 0;  // likewise: which parameters are not frozen

  friend bool operator==(const StepKind&, const StepKind&) = default;
};

/// StepKind::modes. `regions`: null where none can be moved.
uint32_t modes_of(const torch::nn::Module& model, const PrecisionRegions* regions);

/// What a model takes with its weights and gradients in files.
struct ModelFileBytes {
  int64_t moved = 0;   ///< of weights and buffers: not in memory then
  int64_t beside = 0;  ///< in memory then: the window, and small gradients

  friend bool operator==(const ModelFileBytes&, const ModelFileBytes&) = default;
};

/// What of a step is in files: nothing; the optimizer's state; that, the weights and the gradients.
enum class InFiles : uint8_t { Nothing, State, Everything };

inline InFiles in_files(const StepPlan& plan) {
  return plan.model_in_file ? InFiles::Everything : plan.state_in_file ? InFiles::State : InFiles::Nothing;
}

/// The micro-batches of a step, to run before the step itself does.
class StepTrial {
 public:
  StepTrial() = default;
  StepTrial(const StepTrial&) = delete;
  StepTrial& operator=(const StepTrial&) = delete;
  virtual ~StepTrial() = default;

  /// The first `items` items, until unload(). `to_measure`: of a batch that the step does not cut into such parts.
  virtual void load(int64_t items, bool to_measure = false) = 0;
  virtual void unload() = 0;
  /// Forward and loss of the items that are loaded, as the step will run them.
  virtual at::Tensor loss() = 0;
  /// Makes gradients, of zeros, as they are from the second micro-batch on; or drops them.
  virtual void hold_gradients(bool held) = 0;
  /// After a loss: how much of the step's state_bytes is of parameters that no loss gives a gradient to. It will not
  /// come.
  virtual int64_t idle_state_bytes() const = 0;
  /// After a loss: why the batch must not be cut; empty: it may.
  virtual std::string pinned_by() const = 0;
  /// Puts that into files, and the rest into memory. No effect on what cannot leave. Throws as an allocation does.
  virtual void put(InFiles /*what*/) {}
  /// The step's bytes with that in files; of activations, none.
  virtual BytesByKind bytes(InFiles /*what*/) const { return {}; }
  /// StepCounts::fixed_bytes, as it is now, without copies in the journal. No items are loaded, and no gradients are
  /// held.
  virtual int64_t fixed_bytes() const = 0;
  /// Of the step: takes back what its trials change.
  virtual EffectJournal& journal() = 0;
  /// What plans hold for: see describe_stepper.
  virtual std::string described() const = 0;
};

/// Bytes and items that a plan is made for.
struct StepCounts {
  int64_t batch = 0;                    ///< items
  int64_t at_most = RankSplit::kWhole;  ///< items in a micro-batch: what all ranks have agreed on
  int64_t fixed_bytes = 0;              ///< alive all the time: everything but gradients and activations
  int64_t gradient_bytes = 0;           ///< of all
  int64_t optimizer_bytes = 0;          ///< workspace of the optimizer's part
  StateFileBytes state_file = {};       ///< with the state in a file: what is not in memory, and the workspace
  ModelFileBytes model_file = {};       ///< with the model in files: what is not in memory, and what is beside

  // Which trials show:
  int64_t effect_bytes = 0;  ///< of copies of what the step writes outside of itself
  int64_t kept_bytes = 0;    ///< of results that the program keeps until the next step, in profiles: see ProfiledStep
  int64_t idle_state_bytes = 0;  ///< of parameters that get no gradient: fixed_bytes is without
  int64_t left_free = 0;         ///< since a step, or a plan that was tried, ran out of memory
};

/// What a step is, before it is planned.
struct StepToPlan {
  StepTrial& trial;
  StepKind kind = {};
  StepCounts counts = {};
  int64_t micro_batch = 0;        // items in each; 0: to be chosen
  int64_t state_bytes = 0;        // of fixed_bytes: state that the optimizer may have yet to allocate
  bool is_within_window = false;  // there are gradients of earlier micro-batches
};

/// Whether a plan for steps of kind `large` serves those of kind `small`: no side of a tensor is longer, and at most a
/// fifth is wasted.
bool covers(const StepKind& large, const StepKind& small);

}  // namespace snug::detail
