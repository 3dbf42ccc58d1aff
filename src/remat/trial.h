#pragma once
// profile_step and plan_activations for a caller with an open EffectJournal. The journal takes back the changes of the
// runs.

#include <cstdint>
#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include "snug/plan.h"
#include "src/planner/profile.h"
#include "src/planner/solution.h"
#include "src/remat/effect_journal.h"

namespace snug::detail {

struct ProfiledStep {
  plan::Profile profile;
  int64_t kept_bytes = 0;
};

struct TrialOptions {
  bool counts_kept = false;  ///< see profile_step
  bool persists = true;      ///< whether everything is tried to fit into a MemoryLimit; false: little is tried
};

/// See snug::profile_step. With `counts_kept`, the profile describes a step in a sequence of steps. A program may keep
/// a result of one step in a variable. The result is alive when the next step begins, until the next step assigns the
/// variable. Then the profile begins with the bytes of the result, and releases the bytes when the step did.
/// `kept_bytes` is the number of the bytes, which are alive now.
ProfiledStep profile_step(const std::function<at::Tensor()>& forward_and_loss, const ProfileOptions& options,
                          EffectJournal& journal, TrialOptions trial);

/// See snug::plan_activations.
ActivationPlan plan_activations(plan::Profile profile, const std::function<at::Tensor()>& forward_and_loss,
                                Bytes budget, std::optional<plan::Solution> found, EffectJournal& journal);

}  // namespace snug::detail
