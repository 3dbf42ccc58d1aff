#pragma once
// What is inside a DataParallel, and what of it a Stepper needs, which knows when a step begins, ends or fails.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "snug/distributed/data_parallel.h"

namespace snug {

class DataParallel::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(const NamedTensors& parameters, const NamedTensors& buffers, std::shared_ptr<ProcessGroup> group,
       DataParallelOptions options);
  ~Impl();

  void start();  // needs weak_from_this()
  void begin_forward();
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  void end_forward() { is_in_forward_ = false; }

  ProcessGroup& group() const { return *group_; }
  const std::shared_ptr<ProcessGroup>& shared_group() const { return group_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t bytes_reduced() const { return bytes_reduced_; }
  const CommunicationTime& communication() const { return time_; }
  void check_replicas() const;
  int quiet_guards = 0;

  /// In between, backward passes belong to no step: their gradients are dropped, and the group sends nothing.
  void begin_rehearsal();
  void end_rehearsal();

  bool has_static_graph() const { return options_.static_graph; }

  // For Stepper. What all ranks do before a pass that sends is done here, so that it does not matter how many quiet passes each has before.
  // Inside a step gradients are summed.
  void begin_step();
  /// The step's gradients were sent, and those of all ranks have come.
  bool is_reduced() const { return is_reduced_; }
  void end_step() { is_step_begun_ = false; }
  /// Where this rank's step has failed, before its gradients were sent or while they were: takes part in what the others still do, with
  /// zeros.
  void send_zeros();
  /// As after the constructor. All ranks do it, or none.
  void start_over();

 private:
  class Hook;
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  void make_reducer();
  bool divides() const { return options_.reduction == Reduction::Mean && !is_step_begun_; }
  void check_nobody_takes_gradients() const;
  void synchronize();
  void enter_backward(bool forward_was_quiet);
  void end_backward();
  void take_gradient(size_t index);
  void check_all_have_gradients() const;
  void let_go_of_views();

  std::shared_ptr<ProcessGroup> group_;
  DataParallelOptions options_;
  std::vector<std::string> names_;  // of the parameters that have gradients
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
  int64_t bytes_reduced_ = 0;
  CommunicationTime time_;
  std::vector<std::pair<uintptr_t, Accumulator>> hooks_;
  std::unique_ptr<c10d::Reducer> reducer_;
  Hook* hook_ = nullptr;  // the Reducer's

  bool is_in_forward_ = false;
  bool is_prepared_ = false;          // the next backward is to reduce
  bool is_first_static_pass_ = true;  // with static_graph
  bool is_step_begun_ = false;
  bool is_reduced_ = false;
  std::atomic<int> pass_ = -1;  // the backward pass that started at an output of ours
  std::vector<uint8_t> has_gradient_;
};

}  // namespace snug
