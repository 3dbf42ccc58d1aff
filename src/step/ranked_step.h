#pragma once
// RankedStep: the part that the ranks of a data-parallel job do together in one step, in this order, however many
// micro-batches each of them has.
//
//   Split      with a memory_budget, in step()
//   Trained    where buckets are made anew after the first step
//   begin      those buckets, and buffers, as rank 0 has them
//   Passes     where the model sends in each forward pass (SyncBatchNorm), in step()
//   Items      before the first backward
//   gradients  in the last micro-batch's backward, bucket by bucket; then those that DataParallel does not send
//   Sums       after the last backward
//   Skip       with loss scaling
//   Write      before the first parameter is written; snug's optimizers have all that they need by then
//
// Names with a capital are talks (rank_verdict.h). A rank that fails sends zeros where the others wait for its
// gradients, and says so in their next talk. So nobody waits for it, and all drop the step; or make it again, if all
// that has failed is that ranks ran out of memory which can do with less. Alone, all of this does nothing.

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
  /// `parallel`: null alone. Throws ConfigError if it is of another model, which has not these parameters.
  RankedStep(DataParallel* parallel, const std::vector<at::Tensor>& of_model);

  bool is_alone() const { return parallel_ == nullptr; }
  /// Until what it returns is let go of, passes may run on one rank alone, to plan a step: what they would send is not
  /// sent. Their gradients are to be dropped. Throws ConfigError where it would remember such passes.
  [[nodiscard]] std::shared_ptr<void> rehearse() const;
  /// See DataParallel::Impl::bucket_bytes_in_backward.
  int64_t bucket_bytes() const;
  /// Rank 0's value.
  int64_t from_rank_zero(int64_t value) const;
  /// The smallest of all ranks. Throws ConfigError, on all, if only some of them plan for it.
  Bytes smallest_budget(Bytes own, bool plans) const;
  /// `live`: bytes on this rank. Throws BudgetExceeded, on all ranks, naming one on which they are more than that.
  /// `failure`: why this rank cannot go on, or null; it is thrown here, and an Error on the others.
  void check_all_fit(Bytes budget, int64_t live, const std::exception_ptr& failure) const;
  /// For GradScaler::agree_by, inside a step: Talk::Skip, then that. Empty alone.
  std::function<void(const at::Tensor&)> agreement();

  /// The opening of a step. `trained`: a number below 2^32 that says what it trains, which is to be the same on all
  /// ranks.
  void open(uint32_t trained);

  /// A step begins that all ranks split alike: agree_on_split(), until it is settled.
  void begin_split() { stage_ = Stage::Splitting; }
  /// Talk::Split.
  AgreedSplit agree_on_split(const RankSplit& own);

  /// `has_masters`: gradients are gathered elsewhere after each micro-batch.
  void begin(bool has_masters);
  bool is_agreed() const { return stage_ != Stage::Begun; }
  /// Talk::Passes. Throws ConfigError, on all ranks, unless they have equally many micro-batches.
  void agree_on_passes(int64_t micro_batches);
  /// Talk::Items. `items` that this rank expects, 0: it has no data. Those of all ranks, at least 1. Throws
  /// ConfigError, on all ranks, where they train other parameters.
  double agree_on_items(double items);

  /// Forward of one micro-batch. Gradients of a `quiet` one stay on this rank; backward too is then to be inside
  /// NoSync.
  template <class F>
  at::Tensor forward(F&& loss_of) {
    return parallel_ != nullptr ? parallel_->forward(std::forward<F>(loss_of)) : loss_of();
  }
  bool is_quiet(bool is_last) const { return parallel_ != nullptr && (!is_last || has_masters_); }
  DataParallel& parallel() { return *parallel_; }

  /// After the last micro-batch: what was not sent with it, because there was none or because it had no items. `all`:
  /// what holds gradients.
  void send_the_rest(const NamedTensors& all);
  /// Talk::Sums. In place: sums over all ranks.
  void sum(double& items, at::Tensor& loss_sum, int64_t& batch_items);
  /// Talk::Write. From here on a rank that fails stays behind.
  void confirm_writing();
  /// From here on it does not: all have written.
  void written() { stage_ = Stage::Written; }
  /// The step is made.
  void end();

  /// Other ranks have said why the step is given up.
  bool is_dropped() const { return heard_.has_value(); }
  /// A snapshot is loaded, on all ranks: a step that this one did not make is no matter any more.
  void catch_up() { is_left_behind_ = false; }
  /// The step is given up. Gradients must be dropped before. True: all make it again, from the split on.
  /// `smallest`: bytes that would do, where that is known.
  bool fail(RankFailure failure, const NamedTensors& all, Bytes smallest = Bytes(0));
  /// The ranks are not in step any more: there is nobody to tell.
  void lose_group();

  /// Of gradients, by this rank, since begin().
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
  std::optional<Verdict> heard_;  // why the others have given up this step
  bool is_left_behind_ = false;   // the others made a step that this one did not
  int64_t bytes_of_others_ = 0;
  int64_t bytes_before_ = 0;
  CommunicationTime time_before_;
};

}  // namespace snug::detail
