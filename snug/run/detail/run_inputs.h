#pragma once
// Checks of the inputs of a run before it starts.

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "snug/data/text_corpus.h"

namespace snug::detail {

/// "cpu", "cuda" (the device of this rank among those of its machine) or "cuda:1". Throws ConfigError if the device
/// does not exist.
c10::Device parse_device(const std::string& name, int local_rank);

/// Makes `device` the current one of this thread, so that nothing is allocated on another by default. Returns it.
c10::Device make_current(c10::Device device);

/// A checksum of the text itself: a run on another text is another run, even with the same windows.
int64_t checksum(const TextCorpus& corpus);

/// Throws ConfigError if a rank's share of a batch, as tensors, is larger than the memory of the machine.
void check_batch_fits(int64_t batch, int64_t context, int ranks);

}  // namespace snug::detail
