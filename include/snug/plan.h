#pragma once
// Rematerialize: runs a forward and backward pass of any model within a number of bytes. Results that are cheap to
// compute again are dropped in forward, and rebuilt operator by operator when backward asks for the results. Where
// offloading is allowed, results that take long or are impossible to compute again go to disk, or from a device to host
// memory. On a CPU gradients, buffers and random numbers equal the values of plain training, to the bit; on other
// devices the kernels decide (docs/devices.md). Plain training: all that autograd saves is kept in memory.
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
// The idea, the search and the sources: docs/plans.md.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/offload.h"
#include "snug/offload_link.h"

namespace snug {

namespace detail {
class PlanContent;
}

/// What to keep, to rebuild and to offload in one forward and backward pass. Copies share content, which does not
/// change.
class ActivationPlan {
 public:
  int64_t predicted_peak_bytes = 0;  ///< rise of memory above the level before the forward pass, with gradients
  double predicted_seconds = 0;      ///< forward and backward
  int64_t plain_peak_bytes = 0;      ///< the same without a plan
  double plain_seconds = 0;

  /// Describes the plan for people: storages alive at the peak, storages rebuilt or offloaded with the costs, and how
  /// far from the fastest plan this plan can be.
  std::string explain() const;
  /// The bytes offloaded so far, in all passes under this plan and the plan's copies.
  SaveOnHost::Report offloaded() const;

  /// The plan, and the profile from which the plan was made.
  std::string to_json() const;
  /// Throws ConfigError if `text` is not a plan from to_json().
  static ActivationPlan from_json(std::string_view text);

 private:
  friend class detail::PlanContent;
  explicit ActivationPlan(std::shared_ptr<const detail::PlanContent> content);

  std::shared_ptr<const detail::PlanContent> content_;
};

/// Returns the fastest plan found whose peak stays within `budget` bytes above the level of memory at the call. New
/// gradients count. `forward_and_loss` must return the loss: a scalar that requires a gradient.
///
/// The function first records the operators, the least time of each operator, and every byte that the passes take.
/// `forward_and_loss` is called twice for the record. If plain training does not fit into `budget`, or into
/// a MemoryLimit in force, further calls are made under frugal plans, which drop and rebuild nearly everything saved:
/// - one call without a backward pass;
/// - one call for each attempt that did not fit: plain training, and at most 4 frugal plans, 24 on a CPU.
///
/// Then `forward_and_loss` is called a few times under plans. A call under a plan checks two facts:
/// - Rebuilt values have the same bits. A storage with other bits is kept or offloaded from then on.
/// - Memory rises no higher than predicted. A higher rise is included in the next plan.
///
/// With `link` from measure_offload_link, a storage goes to disk, or from a device to host memory, if a rebuild takes
/// more time than the way out and back. The default link has speed 0: nothing is offloaded.
///
/// After each call of `forward_and_loss`, also if the call throws, the following state is as before:
/// - gradients to which a backward pass has added, also a backward pass inside the forward pass or in a hook;
/// - memory that existed before and that operators of the forward pass have written on this thread, with the memory's
///   size: memory of parameters, buffers and any other tensors;
/// - the default generators.
///
/// The following state is not put back:
/// - other state that the callable keeps;
/// - memory that the callable gives a tensor by set_data;
/// - writes by hooks in the backward pass, except to gradients;
/// - gradients of a backward() that the program itself calls in Python.
///
/// Times and bytes are measured on the loss's device: a CPU, or an accelerator's current stream and the accelerator's
/// allocator, which rounds. Backward runs on this thread. On a CPU, no other thread may allocate tensors during the
/// call: the other thread's bytes would be counted too.
///
/// The call takes as much memory as
/// - plain training, at most `budget`; or little more than the least that a plan can reach, with offloading if the link
///   has a speed;
/// - copies of gradients that exist already;
/// - copies of earlier memory that the forward pass writes to, unless the memory is all zero;
/// - copies of generators.
///
/// Throws
/// - BudgetExceeded if no plan was found. The exception's smallest_feasible() names a budget that is enough. The named
///   budget was tried in the same way, unless a MemoryLimit forbids the trial, or plan after plan comes out otherwise.
///   If memory rises above the prediction of plan after plan, the exception names no budget;
/// - ConfigError if the step cannot be recorded, as with StepInBackward, which would update parameters;
/// - ConfigError if only the first forward pass initialises a parameter, from the batch or as lazy modules do (call the
///   model once before);
/// - ConfigError if the calls give different losses, as with a callable that keeps its own state;
/// - c10::OutOfMemoryError if not even the most frugal attempt fits into a MemoryLimit;
/// - Error if operators that run again compute other values under plan after plan;
/// - any exception of the callable.
ActivationPlan plan_activations(const std::function<at::Tensor()>& forward_and_loss, Bytes budget,
                                OffloadLink link = {});

/// While a Rematerialize lives, one forward pass on this thread runs under the plan. Backward comes after the forward
/// pass, once or several times. Each further pass rebuilds the storages that were held for a single pass.
///
/// The forward pass may differ from the profile:
/// - Tensors may be smaller, as in a shorter batch.
/// - Operators may differ, and the first difference is noticed. From the first different operator on, everything is
///   kept. Before a different operator writes to the inputs of dropped results, the dropped results are rebuilt. The
///   cost is memory, never the result.
/// - Results may be larger, and larger results are noticed. Larger results are kept, dropped and rebuilt as the plan
///   says, and the peak is higher.
///
/// If the plan drops a storage, and other code writes to the storage between forward and backward, backward throws
/// snug::Error.
///
/// An offloaded storage is written when the last tensor on the storage is gone, and is back in memory when backward
/// first needs the storage. The step waits for the transfers, or goes on, as the plan says. After a failed write the
/// storage stays in memory, and offloaded() reports the failure. After a failed read, backward throws snug::Error.
///
/// Hooks and checkpointed regions inside the scope handle the tensors that are saved inside the hooks and regions.
class [[nodiscard]] Rematerialize final {
 public:
  /// Throws Error if the plan offloads and no file can be made in the directory of the profile's link.
  explicit Rematerialize(ActivationPlan plan);
  ~Rematerialize();
  Rematerialize(const Rematerialize&) = delete;
  Rematerialize& operator=(const Rematerialize&) = delete;

  /// Describes the first operator that differed from the profile or had larger results; empty: none so far.
  std::string deviation() const;
  /// Whether all operators so far were the profile's operators. The results may be larger.
  bool follows_plan() const;
  /// The number of operators that ran again. The counter stays valid, and counts, while backward runs.
  std::shared_ptr<const std::atomic<int64_t>> replayed_operators() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
