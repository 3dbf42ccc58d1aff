#pragma once
// profile_step: a forward and backward pass of any model as a list of operators and storages, from which plans are
// made.
//
// Rematerialize: a forward and backward pass of any model under a number of bytes. What is cheap to compute again is
// dropped in forward and rebuilt, operator by operator, when backward asks for it; where that is allowed, what is dear
// or impossible to compute again goes to disk, or from a device to host memory. Gradients, buffers and random numbers
// are those of plain training, to the bit.
//
//   const auto step = [&] { return loss_function(model->forward(x), y); };
//   const auto plan = snug::plan_activations(step, snug::Bytes::parse("300MiB"));
//   std::cout << plan.explain();
//   for (...) {
//     torch::Tensor loss;
//     {
//       const snug::Rematerialize scope(plan);
//       loss = step();
//     }
//     loss.backward();
//   }
//
// The idea, the search and its sources: docs/plans.md.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/offload.h"
#include "snug/planner.h"
#include "snug/profile.h"

namespace snug {

struct ProfileOptions {
  /// That plain training may take above the level at the call. If it takes more, or more than a MemoryLimit in force
  /// allows, the profile is taken while nearly everything that is saved is dropped and rebuilt, which is slower. It is
  /// the same.
  Bytes memory = Bytes::unlimited();
  /// Over which plans made from the profile may offload; see measure_offload_link. As it is, they do not.
  OffloadLink link = {};
};

/// Runs forward and backward passes and writes down their operators, the least of their times, and every byte that they
/// take. `forward_and_loss` returns the loss: a scalar that requires a gradient. It is called up to three times. Where
/// plain training does not fit, it is also called once without a backward pass, and once for each way that did not fit:
/// plainly, and under at most 4 frugal plans, on a CPU 24.
/// After each call, also if it throws, these are as they were before:
/// - gradients that a backward pass has added to, also one inside the forward pass or in a hook;
/// - memory that was there before and that operators of the forward pass have written, on this thread, with its size:
///   that of parameters, buffers and any other tensors;
/// - the default generators.
/// These are not:
/// - other state that the callable keeps;
/// - memory that it gives a tensor by set_data;
/// - what hooks write in the backward pass to anything but gradients;
/// - gradients of a backward() that the program itself calls in Python.
/// Times and bytes are those of the device that the loss is on: of a CPU, or of an accelerator's current stream and its
/// allocator, which rounds. Backward runs on this thread. On a CPU no other thread may allocate tensors meanwhile,
/// which would be counted too.
/// Memory: what plain training takes, at most `options.memory`, or little more than the least that a plan can reach,
/// offloading included where there is a link; and copies of gradients that are there already, of what the forward pass
/// writes to memory that was there before, unless it is zero, and of generators.
/// Throws ConfigError where the profile cannot be taken, as with StepInBackward, which would update parameters, or
/// where only the first forward pass initialises a parameter, from its batch or as lazy modules do (call it once
/// before); c10::OutOfMemoryError where not even the most frugal way fits into a MemoryLimit; and what the callable
/// throws.
StepProfile profile_step(const std::function<at::Tensor()>& forward_and_loss, ProfileOptions options = {});

class ActivationPlan;

namespace detail {
class EffectJournal;
ActivationPlan plan_activations(StepProfile, const std::function<at::Tensor()>&, Bytes, std::optional<RematPlan>,
                                EffectJournal&);
}  // namespace detail

/// What to keep, to rebuild and to offload in one forward and backward pass. Copies share their content, which does not
/// change.
class ActivationPlan {
 public:
  int64_t predicted_peak_bytes =
      0;                         ///< how far memory rises above its level before the forward pass, gradients included
  double predicted_seconds = 0;  ///< forward and backward
  int64_t plain_peak_bytes = 0;  ///< the same without a plan
  double plain_seconds = 0;

  /// Plans for a profile that was taken before; `options` limit the search. What plan_activations verifies is not
  /// verified here. Throws BudgetExceeded as plan_activations does.
  ActivationPlan(const StepProfile& profile, Bytes budget, plan::SolverOptions options = {});

  /// For people: what is alive at the peak, what is rebuilt or offloaded and what that costs, how far from the fastest
  /// plan it can be.
  std::string explain() const;
  /// What was offloaded so far, in all passes under this plan and its copies.
  OffloadReport offloaded() const;

  /// The plan and the profile that it was made from.
  std::string to_json() const;
  /// Throws ConfigError for what is no plan.
  static ActivationPlan from_json(std::string_view text);

  /// What it was made from, and what it does with each storage.
  const StepProfile& profile() const;
  const RematPlan& choice() const;

 private:
  friend class Rematerialize;
  friend ActivationPlan detail::plan_activations(StepProfile, const std::function<at::Tensor()>&, Bytes,
                                                 std::optional<RematPlan>, detail::EffectJournal&);
  struct Content;
  struct Trial {
    std::set<int> different = {};  // storages that had other bits when they were rebuilt
    int64_t peak_bytes = 0;        // as measured
  };
  Trial try_step(const std::function<at::Tensor()>& forward_and_loss, detail::EffectJournal& journal) const;
  explicit ActivationPlan(std::shared_ptr<const Content> content);
  std::shared_ptr<const Content> content_;
};

/// The fastest plan found whose peak stays within `budget` bytes above the level of memory at the call, new gradients
/// included. Calls `forward_and_loss` (see profile_step) a few times: for the profile, and under the plan, to see that
/// what is rebuilt has the same bits and that memory rises no higher than predicted. What has not is kept or offloaded
/// from then on; what rises higher is planned for. Throws BudgetExceeded, whose smallest_feasible() says what would do:
/// that is tried in the same way, unless a MemoryLimit forbids it, or plan after plan comes out otherwise. Throws
/// ConfigError where the calls give other losses, as with a callable that keeps state of its own, and Error
/// where plan after plan does not come out as predicted. With `link`, which measure_offload_link gives, what is rebuilt
/// in more time than its way to disk, or from a device to host memory, and back goes there.
ActivationPlan plan_activations(const std::function<at::Tensor()>& forward_and_loss, Bytes budget,
                                OffloadLink link = {});
/// The same with a profile of it that was taken before, but for the comparison of losses. `found`, a plan for that
/// profile and budget that a search has found already, is tried before another is searched for.
ActivationPlan plan_activations(StepProfile profile, const std::function<at::Tensor()>& forward_and_loss, Bytes budget,
                                std::optional<RematPlan> found = {});

/// While it lives, one forward pass on this thread runs under the plan. Backward comes after it, once or more often
/// (then what was held for a single pass is rebuilt again). Tensors may be smaller than those that were profiled, as in
/// a shorter batch. Operators that are others are noticed: from the first on, everything is kept, and what was dropped
/// is rebuilt before they write to what it was made of, which costs memory, never the result. Results that are larger
/// are noticed, too: they are kept, dropped and rebuilt as the plan has it, and the peak is higher. Where the plan
/// drops what something else writes to between forward and backward, backward throws snug::Error. What the plan
/// offloads is written when the last tensor on it is gone, and is there again when backward first needs it; the step
/// waits for it, or goes on, as the plan has it. What cannot be written stays in memory, and offloaded() tells; what
/// cannot be read back makes backward throw snug::Error. Hooks and checkpointed regions inside handle what is saved
/// inside of them.
class [[nodiscard]] Rematerialize final {
 public:
  /// Throws Error if the plan offloads, and there can be no file in the directory of its profile's link.
  explicit Rematerialize(ActivationPlan plan);
  ~Rematerialize();
  Rematerialize(const Rematerialize&) = delete;
  Rematerialize& operator=(const Rematerialize&) = delete;

  /// The first operator that was another than in the profile, or had larger results, in words; empty if there was none
  /// so far.
  std::string deviation() const;
  /// Whether all operators so far were those of the profile. Their results may be larger.
  bool follows_plan() const;
  /// The number of operators that ran again. It lives on, and counts, while backward runs.
  std::shared_ptr<const std::atomic<int64_t>> replayed_operators() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
