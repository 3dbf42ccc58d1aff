#pragma once
// StepRanks: the part of a step that the ranks of a data-parallel job do together, in the same order, however many
// micro-batches each rank has. New buckets, and buffers, come from rank 0 in begin(). Gradients are sent in the last
// micro-batch's backward, bucket by bucket; then gradients that DataParallel does not send.
//
// Names with a capital are exchanges; distributed/rank_verdict.h has the exchanges in the order of a step. StepRanks
// itself is a rank alone, and does nothing. RankedStep (distributed/ranked_step.h) speaks with the other ranks.

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/clip.h"
#include "snug/core.h"
#include "snug/step_plan.h"
#include "snug/training_ranks.h"

namespace torch::nn {
class Module;
}

namespace snug::detail {

/// Why a rank gives up a step. A larger value is a graver reason.
enum class RankFailure : int64_t {
  None,
  Other,        ///< any exception but the following
  TakesLess,    ///< out of memory, but the rank can repeat the step with less
  OutOfMemory,  ///< out of memory, and the rank cannot do with less
  LeftBehind,   ///< failed while writing the last step, and the other ranks made the step
};

/// One rank's report on the micro-batch.
struct RankSplit {
  static constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

  /// Items in the rank's micro-batches, or in the micro-batches of an earlier agreement; kWhole: no need to cut.
  int64_t at_most = kWhole;
  int64_t batch = 0;        ///< items of the rank's share
  int64_t is_planned = 0;   ///< 1: the plan for `at_most` is made, or the rank has no items and needs no plan
  int64_t has_no_plan = 0;  ///< 1: no plan fits, unless the ranks shard their weights
};

struct AgreedSplit {
  int64_t at_most = RankSplit::kWhole;  ///< items in the micro-batches of every rank
  int64_t largest_batch = 0;
  bool is_settled = false;  ///< every rank's plan is for `at_most`; otherwise all ranks plan for it, and report again
  bool shards_weights = false;  ///< a rank has no plan: all ranks shard their weights, and plan anew
};

class StepRanks {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  virtual ~StepRanks() = default;

  virtual bool is_alone() const { return true; }
  /// This rank, from 0, and the number of ranks.
  virtual int64_t rank() const { return 0; }
  virtual int64_t size() const { return 1; }
  /// Null: each rank has the sums of all gradients before an update. Otherwise the gradients are in shards, and only
  /// this optimizer can update the model.
  virtual const torch::optim::Optimizer* optimizer_of_shards() const { return nullptr; }
  /// The parts of the training that are in shards, and the bytes that follow for this rank, for people. Empty alone.
  virtual std::string explain_shards() const { return {}; }
  /// Weights in shards: the bytes of the weights of other ranks (`outside`), and of the window through which these
  /// weights pass (`in_memory`). Zeros: each rank has all weights.
  virtual PlacedBytes weights_of_others() const { return {}; }
  /// `spare`: bytes of this rank for a larger window. Returns how many of the bytes the window takes. Throws as an
  /// allocation does.
  virtual int64_t widen_window(int64_t /*spare*/) { return 0; }
  /// Bytes by which the window is larger.
  virtual int64_t spare() const { return 0; }
  /// Whether the ranks can take less memory together, by shard_weights().
  virtual bool can_shard_weights() const { return false; }
  virtual bool has_weight_shards() const { return false; }
  /// Called on all ranks. From here on each rank keeps its share of the weights.
  virtual void shard_weights() {}
  /// Whether the ranks of `group` are these ranks: rehearse() silences such a group.
  virtual bool are(const ProcessGroup* /*group*/) const { return false; }

  /// Until the result is released, passes may run on one rank alone, to plan a step: collectives in the passes are not
  /// sent. The gradients of the passes must be dropped. Throws ConfigError if the ranks would remember the passes.
  [[nodiscard]] virtual std::shared_ptr<void> rehearse() const { return nullptr; }
  /// See DataParallel::Impl::bucket_bytes_in_backward.
  virtual int64_t bucket_bytes() const { return 0; }
  /// Rank 0's value.
  virtual int64_t from_rank_zero(int64_t value) const { return value; }
  /// The smallest budget of all ranks. Throws ConfigError, on all ranks, if only some ranks plan for a budget.
  virtual Bytes smallest_budget(Bytes own, bool /*plans*/) const { return own; }
  /// `live`: bytes on this rank. If a rank has more than `budget`, the ranks shard their weights if they can; otherwise
  /// BudgetExceeded is thrown, on all ranks, naming the rank. `failure`: why this rank cannot go on, or null. The
  /// failure is thrown on this rank, and an Error on the others.
  virtual void make_all_fit(Bytes /*budget*/, const std::function<int64_t()>& /*live*/,
                            const std::exception_ptr& failure) {
    if (failure) {
      std::rethrow_exception(failure);
    }
  }
  /// For GradScaler::agree_by, inside a step: the exchange Skip, then the agreement. Empty alone.
  virtual std::function<void(const at::Tensor&)> agreement() { return nullptr; }

  /// Opens a step. `trained`: a number below 2^32 for the trained parameters. The number must be the same on all ranks.
  virtual void open(uint32_t /*trained*/) {}

  /// Begins a step that all ranks split alike. Call agree_on_split() until the split is settled.
  virtual void begin_split() {}
  /// The exchange Split.
  virtual AgreedSplit agree_on_split(const RankSplit& own) { return {own.at_most, own.batch, true}; }

  /// `has_masters`: gradients are gathered elsewhere after each micro-batch.
  virtual void begin(bool /*has_masters*/) {}
  /// The exchange Passes, if `model` sends in forward. Throws ConfigError, on all ranks, unless all have equally many
  /// micro-batches.
  virtual void agree_on_passes(const torch::nn::Module& /*model*/, int64_t /*micro_batches*/) {}
  /// Whether agree_on_items() is not due any more.
  virtual bool is_agreed() const { return true; }
  /// The exchange Items. `items`: the number that this rank expects; 0: no data. Returns the items of all ranks, at
  /// least 1. Throws ConfigError, on all ranks, if ranks train different parameters.
  virtual double agree_on_items(double items) { return items; }

  /// Forward of one micro-batch.
  virtual at::Tensor forward(const std::function<at::Tensor()>& loss_of) { return loss_of(); }
  /// Around forward and backward of one micro-batch. Gradients of a quiet micro-batch stay on this rank.
  [[nodiscard]] virtual std::shared_ptr<void> quiet_unless(bool /*is_last*/) { return nullptr; }

  /// After the last micro-batch: sends the gradients that were not sent with the micro-batch, because this rank had no
  /// micro-batch or because the micro-batch had no items. `all`: everything that holds gradients.
  virtual void send_the_rest(const NamedTensors& /*all*/) {}
  /// The exchange Sums. In place: sums over all ranks. `sums`: of losses and metrics, as in
  /// AccumulationWindow::SumOverRanks. A rank without items gets the names of `metrics` from another rank. Throws
  /// ConfigError, on all ranks, if the names differ.
  virtual void sum(double& /*items*/, at::Tensor& /*sums*/, std::vector<std::string>& /*metrics*/,
                   int64_t& /*batch_items*/) {}
  /// Returns the norm of the gradients of `updated`, and limits the norm to `max_norm` if `max_norm` is above 0. The
  /// exchange Norm, if no rank has all gradients.
  virtual at::Tensor clip(const std::vector<at::Tensor>& updated, double max_norm) {
    return max_norm > 0 ? clip_grad_norm_(updated, max_norm) : grad_norm(updated);
  }
  /// The exchange Write. From here on a rank that fails is left behind.
  virtual void confirm_writing() {}
  /// All ranks have written. From here on a rank that fails is not left behind.
  virtual void written() {}
  /// See DataParallel::check_replicas.
  virtual void check_replicas() const {}
  /// Ends a step that was made, and says what the step has sent.
  virtual void end(StepResult& /*result*/) {}

  /// Whether other ranks have reported why the step is given up.
  virtual bool is_dropped() const { return false; }
  /// A snapshot is loaded, on all ranks: a step that this rank did not make no longer matters.
  virtual void catch_up() {}
  /// Gives up the step. Gradients must be dropped before. True: all ranks repeat the step, from the split on.
  /// `smallest`: a sufficient budget in bytes, if known.
  virtual bool fail(RankFailure failure, const NamedTensors& /*all*/, Bytes /*smallest*/) {
    return failure == RankFailure::TakesLess;
  }
  /// For ranks that are no longer in step. No rank can be told.
  virtual void lose_group() {}
};

}  // namespace snug::detail
