#pragma once
// profile_step: records a forward and backward pass of any model as a list of operators and storages. Plans are made
// from the list.

#include <cstddef>
#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/offload_link.h"
#include "snug/plan.h"
#include "src/planner/profile.h"
#include "src/remat/effect_journal.h"

namespace snug::detail {

struct ProfileOptions {
  /// The most bytes that plain training may take above the level at the call. If plain training takes more, or more
  /// than a MemoryLimit in force allows, the profile is taken while nearly everything saved is dropped and rebuilt. The
  /// second method is slower and gives the same profile.
  Bytes memory = Bytes::unlimited();
  /// The link over which plans made from the profile may offload; see measure_offload_link. The default link is closed:
  /// plans do not offload.
  OffloadLink link = {};
  /// A plan for the expected profile. Runs are under the plan, and rebuilt values are compared with the saved values.
  /// Null: runs are plain.
  const ActivationPlan* plan = nullptr;
  /// false: plain training is known not to fit, and does not run first.
  bool may_fit_plainly = true;
  /// A plain run, or a run under `plan`, that does not fit ends the call. false: frugal plans are tried.
  bool only_so = false;
  /// Enough runs: the first run is cold. A step that kept other results than it let go of is run once more. Operators
  /// have the least time of all runs.
  size_t runs = 2;
};

/// Runs forward and backward passes and records the operators, the least time of each operator, and every byte that the
/// passes take. `forward_and_loss` must return the loss: a scalar that requires a gradient. plan_activations
/// (snug/plan.h) says how often `forward_and_loss` is called, what is put back, where times and bytes are measured, and
/// how much memory the call takes.
///
/// Throws
/// - ConfigError if the profile cannot be taken, as with StepInBackward, which would update parameters;
/// - ConfigError if only the first forward pass initialises a parameter, from the batch or as lazy modules do (call the
///   model once before);
/// - c10::OutOfMemoryError if not even the most frugal attempt fits into a MemoryLimit;
/// - any exception of the callable.
plan::Profile profile_step(const std::function<at::Tensor()>& forward_and_loss, ProfileOptions options = {});

struct ProfiledStep {
  plan::Profile profile;
  int64_t kept_bytes = 0;
  bool is_steady = true;      ///< the step kept as many bytes as it let go of
  bool follows_plan = false;  ///< ProfileOptions::plan was followed, with equal bits
  int64_t peak_bytes = 0;     ///< of the last run, above the level at its beginning
};

struct TrialOptions {
  bool counts_kept = false;  ///< see profile_step
  bool persists = true;      ///< whether everything is tried to fit into a MemoryLimit; false: little is tried
};

/// The same for a caller with an open EffectJournal. The journal takes back the changes of the runs. With
/// `counts_kept`, the profile describes a step in a sequence of steps. A program may keep a result of one step in a
/// variable. The result is alive when the next step begins, until the next step assigns the variable. Then the profile
/// begins with the bytes of the result, and releases the bytes when the step did. `kept_bytes` is the number of the
/// bytes, which are alive now.
ProfiledStep profile_step(const std::function<at::Tensor()>& forward_and_loss, const ProfileOptions& options,
                          EffectJournal& journal, TrialOptions trial);

}  // namespace snug::detail
