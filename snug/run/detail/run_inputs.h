#pragma once
// What a run is given, looked at before it starts.

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "snug/data/text_corpus.h"

namespace snug::detail {

/// "cpu", "cuda" (that of the rank, of those of its machine) or "cuda:1". Throws ConfigError if it is not there.
c10::Device parse_device(const std::string& name, int local_rank);

/// Of the text itself: the same windows of another text are another run.
int64_t checksum(const TextCorpus& corpus);

/// Throws ConfigError if a rank's share of a batch, as tensors, is larger than the memory of the machine.
void check_batch_fits(int64_t batch, int64_t context, int ranks);

}  // namespace snug::detail
