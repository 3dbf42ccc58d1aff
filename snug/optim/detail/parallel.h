#pragma once
// parallel_for: at::parallel_for for sources of snug's own. LibTorch's is a template that runs in one thread where it is compiled without
// OpenMP's flag, which the shared precompiled header does not have; so it is compiled with it once, here.

#include <cstdint>
#include <functional>

namespace snug::detail {

/// Calls `part(begin, end)` for parts of [0, count), each but the last a multiple of `grain` long, on LibTorch's threads.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& part);

}  // namespace snug::detail
