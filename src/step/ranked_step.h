#pragma once
// RankedStep: the part of a step that the ranks of a data-parallel job do together, in the same order, however many
// micro-batches each rank has:
//
//   Split      with a memory budget, in step()
//   Trained    if buckets are made again after the first step
//   begin      new buckets, and buffers, from rank 0
//   Passes     if the model sends in each forward pass (SyncBatchNorm), in step()
//   Items      before the first backward
//   gradients  in the last micro-batch's backward, bucket by bucket; then gradients that DataParallel does not send
//   Sums       after the last backward
//   Skip       with loss scaling
//   Write      before the first parameter is written; snug's optimizers have all memory for the update by then
//
// Names with a capital are exchanges (rank_verdict.h). ranked_step.cpp opens with how a rank fails. Alone, a RankedStep
// does nothing.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "src/step/rank_verdict.h"

namespace snug::detail {

class RankedStep {
 public:
  using NamedTensors = DataParallel::NamedTensors;
  /// `parallel`: null alone. Throws ConfigError if `parallel` is of another model, without these parameters.
  RankedStep(DataParallel* parallel, const std::vector<at::Tensor>& of_model);

  bool is_alone() const { return parallel_ == nullptr; }
  /// Until the result is released, passes may run on one rank alone, to plan a step: collectives in the passes are not
  /// sent. The gradients of the passes must be dropped. Throws ConfigError if `parallel` would remember the passes.
  [[nodiscard]] std::shared_ptr<void> rehearse() const;
  /// See DataParallel::Impl::bucket_bytes_in_backward.
  int64_t bucket_bytes() const;
  /// Rank 0's value.
  int64_t from_rank_zero(int64_t value) const;
  /// The smallest budget of all ranks. Throws ConfigError, on all ranks, if only some ranks plan for a budget.
  Bytes smallest_budget(Bytes own, bool plans) const;
  /// `live`: bytes on this rank. Throws BudgetExceeded, on all ranks, naming a rank with more live bytes than `budget`.
  /// `failure`: why this rank cannot go on, or null. The failure is thrown on this rank, and an Error on the others.
  void check_all_fit(Bytes budget, int64_t live, const std::exception_ptr& failure) const;
  /// For GradScaler::agree_by, inside a step: the exchange Talk::Skip, then the agreement. Empty alone.
  std::function<void(const at::Tensor&)> agreement();

  /// Opens a step. `trained`: a number below 2^32 for the trained parameters. The number must be the same on all ranks.
  void open(uint32_t trained);

  /// Begins a step that all ranks split alike. Call agree_on_split() until the split is settled.
  void begin_split() { stage_ = Stage::Splitting; }
  /// The exchange Talk::Split.
  AgreedSplit agree_on_split(const RankSplit& own);

  /// `has_masters`: gradients are gathered elsewhere after each micro-batch.
  void begin(bool has_masters);
  bool is_agreed() const { return stage_ != Stage::Begun; }
  /// The exchange Talk::Passes. Throws ConfigError, on all ranks, unless all have equally many micro-batches.
  void agree_on_passes(int64_t micro_batches);
  /// The exchange Talk::Items. `items`: the number that this rank expects; 0: no data. Returns the items of all ranks,
  /// at least 1. Throws ConfigError, on all ranks, if ranks train different parameters.
  double agree_on_items(double items);

  /// Forward of one micro-batch. Gradients of a quiet micro-batch stay on this rank, and backward must run inside
  /// NoSync too.
  template <class F>
  at::Tensor forward(F&& loss_of) {
    return parallel_ != nullptr ? parallel_->forward(std::forward<F>(loss_of)) : loss_of();
  }
  bool is_quiet(bool is_last) const { return parallel_ != nullptr && (!is_last || has_masters_); }
  DataParallel& parallel() { return *parallel_; }

  /// After the last micro-batch: sends the gradients that were not sent with the micro-batch, because this rank had no
  /// micro-batch or because the micro-batch had no items. `all`: everything that holds gradients.
  void send_the_rest(const NamedTensors& all);
  /// The exchange Talk::Sums. In place: sums over all ranks.
  void sum(double& items, at::Tensor& loss_sum, int64_t& batch_items);
  /// The exchange Talk::Write. From here on a rank that fails is left behind.
  void confirm_writing();
  /// All ranks have written. From here on a rank that fails is not left behind.
  void written() { stage_ = Stage::Written; }
  /// Ends a step that was made.
  void end();

  /// Whether other ranks have reported why the step is given up.
  bool is_dropped() const { return heard_.has_value(); }
  /// A snapshot is loaded, on all ranks: a step that this rank did not make no longer matters.
  void catch_up() { is_left_behind_ = false; }
  /// Gives up the step. Gradients must be dropped before. True: all ranks repeat the step, from the split on.
  /// `smallest`: a sufficient budget in bytes, if known.
  bool fail(RankFailure failure, const NamedTensors& all, Bytes smallest = Bytes(0));
  /// For ranks that are no longer in step. No rank can be told.
  void lose_group();

  /// Bytes of gradients that this rank has sent since begin().
  int64_t bytes_sent() const;
  CommunicationTime communication() const;

 private:
  enum class Stage { Outside, Splitting, Begun, Agreed, Sent, Writing, Written };
  using Words = std::vector<RankWord>;

  std::vector<int64_t> gather(const std::vector<int64_t>& own) const;
  Words exchange(const RankWord& own) const;
  Words talk(Talk about, const RankWord& own);
  [[noreturn]] void drop(const std::string& why);
  void check_trained(const Words& words);
  void go_along(Stage stage, const NamedTensors& all);
  std::vector<at::Tensor> others(const NamedTensors& all) const;
  void send_others(const NamedTensors& all);

  DataParallel* parallel_;
  uint32_t trained_ = 0;
  bool has_masters_ = false;
  Stage stage_ = Stage::Outside;
  std::optional<Verdict> heard_;  // why the other ranks have given up this step
  bool is_left_behind_ = false;   // the other ranks made a step, and this rank did not
  int64_t bytes_of_others_ = 0;
  int64_t bytes_before_ = 0;
  CommunicationTime time_before_;
};

}  // namespace snug::detail
