#pragma once
// A StateDict as torch's archive, the format of torch::save. A StateDict in it becomes an archive in it.

#include <torch/serialize/archive.h>

#include "snug/state.h"

namespace snug::detail {

void write_state(torch::serialize::OutputArchive& archive, const StateDict& state);

/// Throws CorruptFile, naming the entry, for a value that a StateDict cannot hold.
StateDict read_state(torch::serialize::InputArchive& archive);

}  // namespace snug::detail
