#pragma once
// Ranks have the same parameters because the ranks began with the same values and added the same updates.
// check_replicas() checks the parameters.

#include "snug/distributed/data_parallel.h"

namespace snug::detail {

/// Throws DistributedError, on all ranks alike, naming the first tensor whose bytes differ and the first rank that
/// differs from rank 0.
void check_replicas(ProcessGroup& group, const DataParallel::NamedTensors& tensors);

}  // namespace snug::detail
