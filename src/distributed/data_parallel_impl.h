#pragma once
// The implementation of DataParallel, and its interface for Stepper, which knows when a step begins, ends or fails.

#include <atomic>
#include <cstdint>
#include <map>
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

namespace snug {
namespace detail {

// LibTorch 2.11 shares nodes of graphs in one way, later versions in another.
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
  /// The model's parameters, each once.
  const NamedTensors& all() const { return all_; }
  /// The trained parameters, by the last take_trained().
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  bool sends(const at::Tensor& parameter) const { return sent_.contains(parameter.unsafeGetTensorImpl()); }
  int64_t bytes_reduced() const { return bytes_reduced_; }
  const CommunicationTime& communication() const { return time_; }
  void check_replicas() const;
  /// Throws ConfigError, on every rank, naming the first parameter that differs, or that is frozen on only some ranks.
  void check_same_model(const char* where) const;
  int quiet_guards = 0;

  /// In between, backward passes belong to no step: their gradients are dropped, and the group sends nothing.
  void begin_rehearsal();
  void end_rehearsal();

  /// The bytes of buckets in a backward pass that sends, beside its gradients: a bucket is whole from its first
  /// gradient on. 0: buckets are there all the time.
  int64_t bucket_bytes_in_backward() const;

  bool has_static_graph() const { return options_.static_graph; }

  /// Looks which parameters are trained now, and returns whether they have changed. Changed parameters are sent in
  /// other buckets. Sends nothing itself.
  bool take_trained();
  /// Whether all ranks must now check that they train the same parameters: before they make their buckets anew, which
  /// they do once, after a first pass, and after a check that failed. Returns true once.
  bool take_check() { return std::exchange(is_check_due_, false); }

  // For Stepper. Work that all ranks do before a pass that sends is done here, so that each rank may have any number of
  // quiet passes before it. Inside a step gradients are summed.
  void begin_step();
  /// Whether the step's gradients were sent and those of all ranks have arrived.
  bool is_reduced() const { return is_reduced_; }
  void end_step() { is_step_begun_ = false; }
  /// Call it if this rank's step has failed, before its gradients were sent or while they were. Takes part in the
  /// remaining communication of the others, with zeros.
  void send_zeros();
  /// Returns to the state after the constructor. All ranks must call it, or none.
  void start_over();

 private:
  class Hook;
  using WeakNode = decltype(detail::weak(std::declval<at::Tensor>().grad_fn()));
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  void make_hooks();
  void make_reducer();
  void drop_reducer();
  void check_trained();
  bool divides() const { return options_.reduction == Reduction::Mean && !is_step_begun_; }
  void check_nobody_takes_gradients() const;
  void synchronize();
  void enter_backward(bool forward_was_quiet, const torch::autograd::Node* output);
  void end_backward();
  bool is_any_waiting();
  std::vector<at::Tensor> roots_of_this_pass(const torch::autograd::Node* output) const;
  void leave_sums_to_rank_zero();
  void take_gradient(size_t index);
  void check_all_have_gradients() const;
  void let_go_of_views();
  void note_buckets();
  std::vector<GradientBucket> unsent_zeros();

  std::shared_ptr<ProcessGroup> group_;
  DataParallelOptions options_;
  NamedTensors all_;
  std::vector<bool> is_trained_;    // of those, by the last look
  std::vector<std::string> names_;  // of the ones that are
  std::vector<at::Tensor> parameters_;
  std::unordered_set<const c10::TensorImpl*> sent_;  // the same
  std::vector<std::vector<at::Tensor>> in_buckets_;  // the same, bucket by bucket; where buckets are not always there
  NamedTensors buffers_;
  int64_t bytes_reduced_ = 0;
  CommunicationTime time_;
  std::vector<std::pair<uintptr_t, Accumulator>> hooks_;
  std::shared_ptr<c10d::Reducer> reducer_;  // null where nothing is trained
  std::shared_ptr<c10d::Logger> logger_;    // the Reducer's, which calls it without looking whether there is one
  Hook* hook_ = nullptr;                    // the Reducer's

  bool is_in_forward_ = false;
  bool is_prepared_ = false;          // the next backward is to reduce
  bool is_first_static_pass_ = true;  // with static_graph
  bool is_step_begun_ = false;
  bool is_reduced_ = false;
  bool has_reduced_ = false;  // this Reducer
  bool is_check_due_ = false;
  std::atomic<int> pass_ = -1;  // the backward pass that started at an output of ours
  std::vector<uint8_t> has_gradient_;
  std::unordered_set<const c10::TensorImpl*> summed_;  // parameters whose gradients Reduction::Sum has summed
  std::vector<WeakNode> waiting_;                      // outputs of forward() that no backward pass has come to
};

}  // namespace snug
