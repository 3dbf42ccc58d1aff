#pragma once
// An optimizer's state in shares: each a StateDict as FusedOptimizer's state_dict()["state"], whose entries are numbered by the rank's own
// pieces in order.

#include <functional>
#include <string>
#include <vector>

#include "snug/core/state.h"
#include "snug/distributed/detail/shard_layout.h"
#include "snug/distributed/process_group.h"

namespace snug::detail {

/// The memory of `tensor`, which has no gaps, as one dimension; elements [begin, end).
at::Tensor memory_of(const at::Tensor& tensor, int64_t begin, int64_t end);
/// `tensor`, or a copy of it that lies in memory as `parameter` does.
at::Tensor laid_out_like(const at::Tensor& parameter, const at::Tensor& tensor);

/// Gives an empty tensor on the CPU.
using NewTensor = std::function<at::Tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype)>;

/// On rank `to` the whole, numbered by parameter, in tensors that `make` gives: filled piece by piece, a mebibyte at a time. On the others an
/// empty one. Every rank calls this with the share that is `mine`.
StateDict gather_shares(ProcessGroup& group, int to, const StateDict& mine, const std::vector<ShardPiece>& pieces,
                        const std::vector<at::Tensor>& parameters, const NewTensor& make);
/// The share of `rank`. `places[i]` is the name under which the whole has parameter i. Throws CorruptFile for a tensor of another
/// size than its parameter.
StateDict share_of(const StateDict& whole, const std::vector<std::string>& places, int rank,
                   const std::vector<ShardPiece>& pieces, const std::vector<at::Tensor>& parameters);

}  // namespace snug::detail
