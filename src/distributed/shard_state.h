#pragma once
// An optimizer's state in shares. Each share is a StateDict like FusedOptimizer's state_dict()["state"]; the entries of
// a share are numbered by the rank's own pieces in order.

#include <string>
#include <unordered_map>
#include <vector>

#include "snug/distributed/process_group.h"
#include "snug/state.h"
#include "src/core/writers.h"
#include "src/distributed/shard_layout.h"

namespace snug::detail {

/// Elements [begin, end) of the memory of `tensor`, in one dimension. The tensor must have no gaps.
at::Tensor memory_of(const at::Tensor& tensor, int64_t begin, int64_t end);
/// `tensor`, or a copy of it with the memory layout of `parameter`.
at::Tensor laid_out_like(const at::Tensor& parameter, const at::Tensor& tensor);

/// The whole state, numbered by parameter. The tensors have no memory (meta).
struct WholeState {
  StateDict state;
  std::unordered_map<const c10::TensorImpl*, std::vector<Writers::Part>> parts;  // of each tensor
};

/// Every rank calls whole_state() with the rank's own share, `mine`.
WholeState whole_state(ProcessGroup& group, const StateDict& mine, const std::vector<ShardPiece>& pieces,
                       const std::vector<at::Tensor>& parameters);
/// The share of `rank`. `places[i]` is the name of parameter i in the whole. Throws CorruptFile for a tensor whose size
/// differs from the size of the tensor's parameter.
StateDict share_of(const StateDict& whole, const std::vector<std::string>& places, int rank,
                   const std::vector<ShardPiece>& pieces, const std::vector<at::Tensor>& parameters);

}  // namespace snug::detail
