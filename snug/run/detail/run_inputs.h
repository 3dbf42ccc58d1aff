#pragma once
// Checks of the inputs of a run before it starts.

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "snug/data/text_corpus.h"

namespace snug::detail {

/// As parse_device, which throws ConfigError for what is not there; but an accelerator without an index, such as "cuda", is
/// the device of this rank among those of its machine.
c10::Device device_of_rank(const std::string& name, int local_rank);

/// A checksum of the text itself: a run on another text is another run, even with the same windows.
int64_t checksum(const TextCorpus& corpus);

/// Throws ConfigError if a rank's share of a batch, as tensors, is larger than the memory of the machine.
void check_batch_fits(int64_t batch, int64_t context, int ranks);

}  // namespace snug::detail
