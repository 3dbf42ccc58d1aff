#pragma once
// GradientShards: sums gradients over the ranks, each gradient on the rank that owns the gradient's parameter. The
// other ranks' gradients are released when they are sent, while backward still computes the rest.
//
// Problem: c10d's Reducer keeps the sums of all gradients on each rank.
// Choice: every rank sends its gradient of a parameter to the owner, and the owner adds the ranks' gradients in the
// order of ranks. The ranks send gradients in one order of parameters, so ranks whose graphs differ still match: the
// order of registration from the end, or, after the first pass, the order in which rank 0's gradients were complete. A
// rank that has not used a parameter sends zeros. With several groups of shards the sum goes round the owners of the
// groups: each owner adds the gradients of its group to the sum of the groups before, and the last owner's sum goes on
// to the other owners. So only sums leave a group.
// Consequence: the sum has the bits of any other sum in the order of ranks. With two ranks each sum of two has the same
// bits. With more ranks, Gloo's all-reduce adds in an order that depends on the place of a number in its bucket.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "snug/distributed/process_group.h"

namespace snug::detail {

class GradientShards final {
 public:
  /// `group_size`: the ranks in a group of shards. `owners[i]`, from 0, is the rank in each group that keeps the sum of
  /// the gradients of `parameters[i]`. `at_once`: bytes that may be on their way while backward goes on: gradients, and
  /// what arrives at their owners.
  GradientShards(ProcessGroup& group, int group_size, std::vector<at::Tensor> parameters, std::vector<int> owners,
                 int64_t at_once);
  ~GradientShards();
  GradientShards(const GradientShards&) = delete;
  GradientShards& operator=(const GradientShards&) = delete;

  /// All ranks take rank 0's order. Sends nothing unless a first pass has ended since the constructor.
  void take_order();

  /// Begins a backward pass. `is_used`: for each parameter, whether the pass reaches the parameter on this rank; the
  /// zeros of the other parameters are sent in their turn. Each rank's gradients are divided by `divisor`.
  void begin(const std::vector<bool>& is_used, int divisor);
  /// The gradient of parameter `index` is complete. `references`: the references to the gradient's memory that end
  /// soon, besides the parameter's.
  void complete(size_t index, size_t references);
  /// Ends the pass: sends what is left. When finish() returns, the owners have all sums, and no other rank has a
  /// gradient. `may_be_unused`: a parameter that no rank has used has no gradient afterwards. `counts_all`:
  /// this rank counts as one that has used all parameters.
  void finish(bool may_be_unused, bool counts_all);
  /// Ends the pass of a rank that has failed. The rank sends zeros in the place of gradients not sent yet.
  void finish_with_zeros(bool may_be_unused);

  int64_t bytes_sent() const { return bytes_sent_; }
  /// The bytes that this rank sends in each pass.
  int64_t bytes_of_pass() const;
  /// Seconds in which nothing else was left to do.
  double seconds_waited() const { return waited_; }

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  struct Sent {
    size_t index = 0;
    at::Tensor gradient = {};              // of the owner: in the form of the parameter
    at::Tensor flat = {};                  // its elements
    int64_t chunk = 0;                     // elements
    std::vector<at::Tensor> arrived = {};  // on the owner: a chunk of each other rank of addends()
    Works works = {};                      // the sends; or the receives of a chunk
    int64_t bytes = 0;
  };

  bool is_own(size_t index) const { return owners_[index] == group_.rank() % group_size_; }
  std::vector<int> addends() const;
  int64_t bytes_to_send(size_t index) const;
  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& part, int to, size_t index);
  c10::intrusive_ptr<c10d::Work> receive_from(int rank, const at::Tensor& part, size_t index);
  void start_ready();
  void start(size_t index);
  void receive(Sent& sent, int64_t begin);
  void finish_first();
  void end_pass(bool may_be_unused, bool counts_all);
  void add_up(Sent& sent);
  void send_round(const at::Tensor& sum, const at::Tensor& own, size_t index);
  void forget_sent();

  ProcessGroup& group_;
  int group_size_;
  int groups_ = group_.size() / group_size_;
  int number_ = group_.rank() / group_size_;  // of this rank's group
  std::vector<at::Tensor> parameters_;
  std::vector<int> owners_;
  int64_t at_once_;
  std::vector<size_t> order_;
  std::vector<size_t> completed_;  // in this pass, in order
  bool takes_order_ = false;       // at the next take_order()
  bool has_order_ = false;

  // Of the pass:
  int divisor_ = 1;
  size_t next_ = 0;  // in order_
  std::vector<uint8_t> is_ready_;
  std::vector<uint8_t> has_gradient_;
  size_t completing_ = 0, references_ = 0;  // see complete()
  bool keeps_nothing_ = false;              // the rank has failed
  std::deque<Sent> on_their_way_;
  int64_t bytes_on_their_way_ = 0;

  int64_t bytes_sent_ = 0;
  double waited_ = 0;
};

}  // namespace snug::detail
