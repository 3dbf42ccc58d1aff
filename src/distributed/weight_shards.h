#pragma once
// WeightShards: weights that are on one rank each. Before an operator takes a weight of another rank, the operator seam
// (operator_mode.h) brings the weight into this rank's window (WeightWindow); later the window forgets the weight.
//
// Problem: ranks use weights in different orders, and at different times, and a
// parameter may be used by some ranks only.
// Options: collective operations, for which all ranks must bring the same weights in the same order, or requests.
// Choice: requests. Each rank has a thread for each other rank, which answers with the memory of a weight. Requests and
// answers go through a Gloo backend of their own, so they meet no other message. A rank asks ahead of its operators, in
// the order of the step before (WeightWindow).
// Consequences:
// - No rank may read a weight while the owner writes the weight: the ranks speak with each other before the first
//   write and after the last write of an update.
// - An owner sends a weight once for each other rank.
// - Weights of other ranks are in no memory outside of operators. A request for their pointer throws.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "snug/distributed/process_group.h"
#include "src/distributed/rank_writers.h"
#include "src/memory/operator_mode.h"
#include "src/memory/weight_window.h"

namespace snug::detail {

class WeightShards final : public KeptOnRanks {
 public:
  struct Weight {
    c10::Storage storage;
    int owner;
  };

  /// The same weights on all ranks. `group`: the ranks among which the weights are divided, a part of `all`.
  /// Weight::owner is a rank of `group`. Calls `send_first(i)`, which gives all ranks the values of weight i, then
  /// moves the weight into memory on the owner and releases the weight elsewhere. `window`: bytes of other ranks'
  /// weights that are in memory at a time, at most all of them; 0: twice the largest weight of another rank. Throws on
  /// all ranks, and leaves all weights as they are, if a rank cannot start threads.
  WeightShards(ProcessGroup& all, ProcessGroup& group, std::vector<Weight> weights, int64_t window,
               const std::function<void(size_t number)>& send_first);
  ~WeightShards() override;
  WeightShards(const WeightShards&) = delete;
  WeightShards& operator=(const WeightShards&) = delete;

  /// Called on all ranks before any rank writes weights: no weight is on its way to this rank when the call returns.
  void finish_reading();
  /// Called on all ranks when this rank has written its weights. When the call returns, all ranks of the group have
  /// written, and this rank has none of the old values.
  void written();
  /// All weights come back into the memory of all ranks, and stay. Called on all ranks, before the end. Throws on all
  /// ranks, and changes nothing, if a rank has no memory for all weights.
  void bring_all();

  std::vector<Writers::Part> parts_of(const at::Tensor& tensor) const override;

  /// Bytes of the weights of other ranks, and of the window through which these weights pass.
  int64_t bytes_elsewhere() const;
  int64_t window_bytes() const { return window_ ? window_->bytes() : 0; }
  /// Makes the window of this rank larger than at first, by at most `bytes`, and by no more than all weights of other
  /// ranks need; returns by how many bytes. A small change is left out (WeightWindow::should_widen). Throws as an
  /// allocation does; then the window is as at first. No effect if the constructor got a window.
  int64_t widen(int64_t bytes);
  int64_t spare() const { return spare_; }
  /// Bytes of weights that have come from other ranks, or are on their way, so far.
  int64_t bytes_received() const { return bytes_received_; }

 private:
  class Home;
  struct Coming;

  void start_threads();
  void move_weights(int64_t window, const std::function<void(size_t number)>& send_first);
  Coming ask_for(size_t number, c10::DataPtr memory);
  c10::DataPtr arrived(Coming& coming);
  void answer(int rank) noexcept;
  void end_threads() noexcept;

  ProcessGroup& all_;
  ProcessGroup& group_;
  std::vector<Weight> weights_;
  std::vector<size_t> elsewhere_;  // numbers of the weights of other ranks; the window's numbers are places here
  std::vector<int64_t> requests_;  // of each rank; ends after the backend, which may still receive into it
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::optional<OperatorSeam> seam_;
  std::unique_ptr<Home> home_;
  std::optional<WeightWindow> window_;
  bool is_given_ = false;  // the constructor got the window
  int64_t spare_ = 0;
  std::atomic<int64_t> bytes_received_ = 0;
  std::atomic<bool> answers_ = false;  // the threads wait until the weights have moved
  std::atomic<bool> is_over_ = false;
  std::mutex mutex_;                                   // guards waits_
  std::vector<c10::intrusive_ptr<c10d::Work>> waits_;  // of the threads, for requests
  std::vector<std::thread> threads_;
};

}  // namespace snug::detail
