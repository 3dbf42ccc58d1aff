#pragma once
// Ranks have the same parameters because the ranks began with the same values and added the same updates.
// check_replicas() checks the parameters.

#include "snug/distributed/data_parallel.h"
#include "src/distributed/owners.h"

namespace snug::detail {

/// Throws DistributedError, on all ranks alike, naming the first tensor whose bytes differ and the first rank that
/// differs from the first rank that has the tensor. `owners`: of weights in shards, or null.
void check_replicas(ProcessGroup& group, const DataParallel::NamedTensors& tensors, const Owners* owners = nullptr);

}  // namespace snug::detail
