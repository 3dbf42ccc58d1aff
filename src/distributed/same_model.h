#pragma once
// Ranks with different models would wait for each other for ever, or add gradients of different parameters. So the
// ranks compare models first.

#include <string>
#include <vector>

#include "snug/distributed/data_parallel.h"

namespace snug::detail {

/// The texts of all ranks. Called on all ranks, and not in a rehearsal.
std::vector<std::string> texts_of_all_ranks(ProcessGroup& group, const std::string& text);

/// Throws ConfigError in the name of `where`, on all ranks alike, naming the first of `options` (as text), `parameters`
/// or `buffers` that differs from rank 0.
void check_same_model(ProcessGroup& group, const std::string& options, const DataParallel::NamedTensors& parameters,
                      const DataParallel::NamedTensors& buffers, const char* where = "DataParallel");

}  // namespace snug::detail
