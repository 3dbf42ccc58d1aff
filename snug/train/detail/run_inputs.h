#pragma once
// What a run is given, looked at before it starts.

#include <cstdint>
#include <filesystem>
#include <string>

#include <c10/core/Device.h>

#include "snug/data/text_corpus.h"

namespace snug::detail {

/// "cpu", "cuda" (that of the rank, of those of its machine) or "cuda:1". Throws ConfigError if it is not there.
c10::Device parse_device(const std::string& name, int local_rank);

/// Of the text itself: the same windows of another text are another run.
int64_t checksum(const TextCorpus& corpus);

/// Whether a run may not begin in `out`. A folder in which one was killed before its log was there is as good as none.
bool holds_something(const std::filesystem::path& out);

}  // namespace snug::detail
