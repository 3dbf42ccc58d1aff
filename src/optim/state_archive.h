#pragma once
// A StateDict as torch's archive, the format of torch::save. A StateDict inside a StateDict becomes an archive inside
// the archive.

#include <torch/serialize/archive.h>

#include "snug/state.h"

namespace snug::detail {

void write_state(torch::serialize::OutputArchive& archive, const StateDict& state);

/// Throws CorruptFile, naming the entry, for a value that a StateDict cannot have.
StateDict read_state(torch::serialize::InputArchive& archive);

}  // namespace snug::detail
