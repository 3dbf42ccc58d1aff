#pragma once
// An optimizer's state in shares: each a StateDict as FusedOptimizer's state_dict()["state"], whose entries are numbered by the rank's own
// pieces in order.

#include <vector>

#include "snug/core/state.h"
#include "snug/distributed/detail/shard_layout.h"

namespace snug::detail {

/// The memory of `tensor`, which has no gaps, as one dimension; elements [begin, end).
at::Tensor memory_of(const at::Tensor& tensor, int64_t begin, int64_t end);
/// `tensor`, or a copy of it that lies in memory as `parameter` does.
at::Tensor laid_out_like(const at::Tensor& parameter, const at::Tensor& tensor);

/// To send a state: bytes (1-D).
at::Tensor to_bytes(const StateDict& state);
StateDict from_bytes(const at::Tensor& bytes);

/// Of all ranks' shares the whole, numbered by parameter.
StateDict join_shares(const std::vector<StateDict>& shares, const std::vector<ShardPiece>& pieces,
                      const std::vector<at::Tensor>& parameters);
/// The share of `rank`. `places[i]` is the name under which the whole has parameter i. Throws CorruptFile for a tensor of another
/// size than its parameter.
StateDict share_of(const StateDict& whole, const std::vector<std::string>& places, int rank,
                   const std::vector<ShardPiece>& pieces, const std::vector<at::Tensor>& parameters);

}  // namespace snug::detail
