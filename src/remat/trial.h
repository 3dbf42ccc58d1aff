#pragma once
// profile_step and plan_activations for a caller that has an EffectJournal open, which takes back what their runs
// change.

#include <cstdint>
#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include "snug/plan.h"
#include "src/remat/effect_journal.h"

namespace snug::detail {

struct ProfiledStep {
  StepProfile profile;
  int64_t kept_bytes = 0;
};

struct TrialOptions {
  bool counts_kept = false;  ///< see profile_step
  bool persists = true;      ///< whether all is tried to fit into a MemoryLimit; else little is
};

/// See snug::profile_step. With `counts_kept` the profile is that of a step among others: a result of one step that the
/// program keeps in a variable is alive when the next step begins, until that assigns the variable anew. The profile
/// begins with such bytes, and releases them where the step did; `kept_bytes` says how many, which are alive now.
ProfiledStep profile_step(const std::function<at::Tensor()>& forward_and_loss, const ProfileOptions& options,
                          EffectJournal& journal, TrialOptions trial);

/// See snug::plan_activations.
ActivationPlan plan_activations(StepProfile profile, const std::function<at::Tensor()>& forward_and_loss, Bytes budget,
                                std::optional<RematPlan> found, EffectJournal& journal);

}  // namespace snug::detail
