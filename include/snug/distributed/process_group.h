#pragma once
// ProcessGroup: the ranks of a job, and the operations that the ranks make together. Started by torchrun, mpirun, srun
// or `snug launch`, a program needs only
//
//   auto group = snug::init_process_group();  // started alone: a group of one, and everything works as well
//   group->all_reduce(loss);                   // every rank has the sum now
//
// Every rank must call the same operations in the same order.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

struct ProcessGroupOptions {
  /// The meeting place of the ranks: "tcp://HOST:PORT", at which rank 0 listens, or "file:///PATH" on a file system
  /// that all ranks see. Empty: the launcher's meeting place.
  std::string store = {};
  /// Set both, or neither. Neither: the launcher's rank and size.
  std::optional<int> rank = {};
  std::optional<int> size = {};
  /// The time to wait for the other ranks, at the start and in every operation. A century, or more, means for ever.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// The network interface for the ranks' traffic, "eth0". Empty: the variable GLOO_SOCKET_IFNAME; without it, loopback
  /// if the store's host is loopback, otherwise the interface to which this machine's name leads.
  std::string interface = {};
  /// The job's name at the meeting place: ranks with another token, or without a token, do not meet ranks with this
  /// token. Empty: the variable SNUG_JOB_TOKEN. `snug launch` on one machine sets the variable at random if the
  /// variable is not set. The token is not a password: LibTorch's store tells the token to everybody who asks.
  std::string token = {};
  /// Variable -> value, used instead of this process's variables.
  std::optional<std::map<std::string, std::string>> environment = {};
};

/// How an all-reduce combines the numbers of the ranks.
enum class ReduceOp { Sum, Max, Min };

/// All operations throw DistributedError if a rank is lost or does not come within the timeout; the group is then
/// unusable. Tensors must be contiguous, have the same shape and dtype on all ranks, and be on the CPU (Gloo) or, if
/// snug is built against a LibTorch with NCCL, on this rank's CUDA device.
class ProcessGroup final {
 public:
  /// Bytes of the tensors that this rank handed to each kind of operation. The bytes on the wire depend on the
  /// algorithm.
  struct Traffic {
    int64_t all_reduce = 0;
    int64_t broadcast = 0;
    int64_t all_gather = 0;
    int64_t reduce_scatter = 0;
  };

  class Impl;
  explicit ProcessGroup(std::unique_ptr<Impl> impl);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  /// This rank, from 0, and the number of ranks.
  int rank() const;
  int size() const;
  /// The rank among the ranks of this machine.
  int local_rank() const;

  /// Replaces `tensor` by the sum (or `op`) over all ranks, in place.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::Sum);
  /// Starts an all_reduce and returns at once. The result is complete when the returned function has returned; call the
  /// returned function at most once.
  [[nodiscard]] std::function<void()> start_all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::Sum);
  /// Overwrites `tensors` with the tensors of rank `root`; small tensors travel together.
  void broadcast(const std::vector<at::Tensor>& tensors, int root = 0);
  /// [...] -> [size, ...]: entry r is the tensor of rank r.
  at::Tensor all_gather(const at::Tensor& tensor);
  /// [size * n, ...] -> [n, ...]: rank r gets the r-th part of the sum.
  at::Tensor reduce_scatter(const at::Tensor& tensor);
  /// Calls `save` on all ranks, which write each snapshot (SnapshotStore::save) and each safetensors file together: a
  /// rank writes its parts of weights in shards and of the state of a ShardedOptimizer, and rank 0 all else. `save` is
  /// the same on all ranks. Any number of ranks loads the files. All ranks must see the files' folder, except ranks
  /// without shards. Throws on all ranks if one fails; then the earlier files stay. Throws ConfigError inside of
  /// `save`.
  void save_together(const std::function<void()>& save);
  /// Returns when all ranks have called barrier().
  void barrier();

  /// The traffic of this rank since the group was made.
  const Traffic& traffic() const;

  Impl& impl() { return *impl_; }  ///< for snug's own use

 private:
  std::unique_ptr<Impl> impl_;
};

/// Waits for all ranks and connects the ranks: by Gloo, and by NCCL if NCCL is built in and CUDA devices exist. Throws:
/// - ConfigError, for options or variables that cannot work;
/// - DistributedError, if the ranks do not connect in time: a port in use, a rank that arrives twice, ranks that
///   disagree on the number of ranks. The message names the missing ranks or the meeting place.
std::shared_ptr<ProcessGroup> init_process_group(ProcessGroupOptions options = {});

}  // namespace snug
