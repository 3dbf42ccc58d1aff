#pragma once
// An optimizer's state in shares. Each share is a StateDict like FusedOptimizer's state_dict()["state"]; the entries of
// a share are numbered by the rank's own pieces in order.

#include <functional>
#include <string>
#include <vector>

#include "snug/distributed/process_group.h"
#include "snug/state.h"
#include "src/distributed/shard_layout.h"

namespace snug::detail {

/// Elements [begin, end) of the memory of `tensor`, in one dimension. The tensor must have no gaps.
at::Tensor memory_of(const at::Tensor& tensor, int64_t begin, int64_t end);
/// `tensor`, or a copy of it with the memory layout of `parameter`.
at::Tensor laid_out_like(const at::Tensor& parameter, const at::Tensor& tensor);

/// Makes an uninitialised tensor on the CPU.
using NewTensor = std::function<at::Tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype)>;

/// Returns the whole state on rank `to`, and an empty state on the other ranks. The whole state is numbered by
/// parameter. `make` returns the tensors of the whole state. The tensors are filled piece by piece, a mebibyte at a
/// time. Every rank calls gather_shares() with the rank's own share, `mine`.
StateDict gather_shares(ProcessGroup& group, int to, const StateDict& mine, const std::vector<ShardPiece>& pieces,
                        const std::vector<at::Tensor>& parameters, const NewTensor& make);
/// The share of `rank`. `places[i]` is the name of parameter i in the whole. Throws CorruptFile for a tensor whose size
/// differs from the size of the tensor's parameter.
StateDict share_of(const StateDict& whole, const std::vector<std::string>& places, int rank,
                   const std::vector<ShardPiece>& pieces, const std::vector<at::Tensor>& parameters);

}  // namespace snug::detail
