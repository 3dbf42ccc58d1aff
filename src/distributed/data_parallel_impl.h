#pragma once
// The implementation of DataParallel, and DataParallel's interface for Stepper. Stepper reports the begin, the end and
// the failure of a step.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "snug/distributed/data_parallel.h"
#include "src/distributed/gradient_shards.h"
#include "src/distributed/owners.h"
#include "src/distributed/weight_shards.h"

namespace snug {
namespace detail {

// LibTorch 2.11 shares nodes of graphs by std::shared_ptr, later versions by c10::intrusive_ptr.
template <class T>
std::weak_ptr<T> weak(const std::shared_ptr<T>& pointer) {
  return pointer;
}
template <class T>
c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& pointer) {
  return c10::weak_intrusive_ptr<T>(pointer);
}

}  // namespace detail

class DataParallel::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const NamedTensors& parameters, const NamedTensors& buffers, std::shared_ptr<ProcessGroup> group,
       DataParallelOptions options);
  ~Impl();

  void begin_forward();
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  void end_forward() { is_in_forward_ = false; }

  ProcessGroup& group() const { return *group_; }
  const std::shared_ptr<ProcessGroup>& shared_group() const { return group_; }
  /// The model's parameters. Each parameter is listed once.
  const NamedTensors& all() const { return all_; }
  /// The trained parameters, by the last take_trained().
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  bool sends(const at::Tensor& parameter) const { return sent_.contains(parameter.unsafeGetTensorImpl()); }
  int64_t bytes_reduced() const { return bytes_reduced_ + (shards_ ? shards_->bytes_sent() : 0); }
  int64_t weight_bytes_received() const { return weight_bytes_ + (weights_ ? weights_->bytes_received() : 0); }
  const DataParallel::CommunicationTime& communication() const { return time_; }
  void check_replicas() const;
  /// Throws ConfigError, on every rank, naming the first parameter that differs or is frozen on only some ranks.
  void check_same_model(const char* where) const;
  int quiet_guards = 0;

  /// Between begin_rehearsal() and end_rehearsal(), backward passes belong to no step: the gradients are dropped, and
  /// the group sends nothing.
  void begin_rehearsal();
  void end_rehearsal();

  /// The bytes of buckets in a backward pass that sends, beside the pass's gradients: a bucket has all its memory from
  /// the bucket's first gradient on. 0: buckets exist all the time.
  int64_t bucket_bytes_in_backward() const;

  bool has_static_graph() const { return options_.static_graph; }

  void gather_weights();
  /// With Shard::Auto: whether each rank still has all weights. The ranks shard the weights together.
  /// `are_same`: all ranks have the same weights; otherwise all ranks get rank 0's.
  bool can_shard_weights() const {
    return options_.shard == Shard::Auto && weights_ == nullptr && owners_->group().size() > 1;
  }
  void shard_weights(bool are_same);
  /// Null: each rank has all weights.
  detail::WeightShards* weight_shards() const { return weights_.get(); }
  /// See StepRanks::explain_shards.
  std::string explain_shards() const;
  bool has_shards() const { return owners_ != nullptr; }
  /// The norm of the gradients of `parameters`, of all ranks; above 0, `max_norm` limits the norm.
  /// `before_sending`: called when the memory for the norm is allocated, if ranks exchange norms.
  at::Tensor clip(const std::vector<at::Tensor>& parameters, double max_norm,
                  const std::function<void()>& before_sending = {});
  /// The only optimizer that may update the model; null without shards.
  const torch::optim::Optimizer* optimizer_of_shards() const;

  /// Finds the parameters that are trained now, and returns whether the set has changed. A changed set is sent in other
  /// buckets. The call itself sends nothing.
  bool take_trained();
  /// Whether all ranks must now check that all ranks train the same parameters. The check is due in two cases:
  /// - before the ranks make new buckets, which happens once, after a first pass;
  /// - after a check that failed.
  ///
  /// Returns true once.
  bool take_check() { return std::exchange(is_check_due_, false); }

  // For Stepper. begin_step() does the work that all ranks do together before a pass that sends, so each rank may have
  // any number of quiet passes before the sending pass. Inside a step gradients are summed.
  void begin_step();
  /// Whether the step's gradients were sent and the gradients of all ranks have arrived.
  bool is_reduced() const { return is_reduced_; }
  void end_step() { is_step_begun_ = false; }
  /// Call send_zeros() if this rank's step has failed before or while the step's gradients were sent. Takes part in the
  /// remaining communication of the other ranks, with zeros.
  void send_zeros();
  /// With shards, for a rank without a pass that sends: sends the gradients of quiet passes, and zeros for the rest.
  /// All parameters count as used.
  void send_shards_of_nothing();
  /// Returns to the state after the constructor. All ranks must call start_over(), or no rank.
  void start_over();

 private:
  class Hook;
  using WeakNode = decltype(detail::weak(std::declval<at::Tensor>().grad_fn()));
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  void make_hooks();
  void make_owners();
  void check_optimizer() const;
  bool is_any_in_file() const;
  void note_written();
  void make_reducer();
  void make_shards();
  bool can_send() const { return reducer_ != nullptr || shards_ != nullptr; }
  std::vector<bool> used_in_this_pass() const;
  void begin_shards(const std::vector<bool>& is_used);
  void finish_shards(bool counts_all);
  void drop_reducer();
  void check_trained();
  bool divides() const { return options_.reduction == Reduction::Mean && !is_step_begun_; }
  void check_nobody_takes_gradients() const;
  void synchronize();
  void enter_backward(bool forward_was_quiet, const torch::autograd::Node* output);
  void end_backward();
  bool is_any_waiting();
  std::vector<at::Tensor> roots_of_this_pass(const torch::autograd::Node* output) const;
  void leave_sums_to_one_rank();
  void take_gradient(size_t index);
  void check_all_have_gradients() const;
  void note_reduced();
  void let_go_of_views();
  void note_buckets();
  std::vector<GradientBucket> unsent_zeros();

  std::shared_ptr<ProcessGroup> group_;
  DataParallelOptions options_;
  NamedTensors all_;
  std::vector<bool> is_trained_;    // for each entry of all_, by the last take_trained()
  std::vector<std::string> names_;  // names of the trained parameters
  std::vector<at::Tensor> parameters_;
  std::unordered_set<const c10::TensorImpl*> sent_;  // the tensors of parameters_
  std::vector<std::vector<at::Tensor>> in_buckets_;  // parameters_ by bucket; empty if buckets exist all the time
  NamedTensors buffers_;
  int64_t bytes_reduced_ = 0;
  int64_t weight_bytes_ = 0;  // of weights that were in shards before
  DataParallel::CommunicationTime time_;
  std::vector<std::pair<uintptr_t, Accumulator>> hooks_;
  std::shared_ptr<detail::Owners> owners_;          // null without shards
  std::unique_ptr<detail::WeightShards> weights_;   // null without Shard::Weights
  std::unique_ptr<detail::GradientShards> shards_;  // with shards, in the place of the Reducer
  double busy_before_ = 0, waited_before_ = 0;      // with shards, at the begin of the pass
  std::shared_ptr<c10d::Reducer> reducer_;          // null if nothing is trained, or with shards
  std::shared_ptr<c10d::Logger> logger_;            // the Reducer's, which calls the logger without a check for null
  Hook* hook_ = nullptr;                            // the Reducer's

  bool is_in_forward_ = false;
  bool is_prepared_ = false;          // the next backward must reduce
  bool is_sending_ = false;           // the last pass reduces
  bool is_first_static_pass_ = true;  // with static_graph
  bool is_step_begun_ = false;
  bool is_reduced_ = false;
  bool has_reduced_ = false;  // whether the current Reducer has reduced
  bool is_check_due_ = false;
  std::atomic<int> pass_ = -1;  // the backward pass that started at an output of forward()
  std::vector<uint8_t> has_gradient_;
  std::unordered_set<const c10::TensorImpl*>
      summed_;                     // parameters whose gradients Reduction::Sum, or shards, have summed
  std::vector<WeakNode> waiting_;  // outputs of forward() that no backward pass has reached
};

}  // namespace snug
