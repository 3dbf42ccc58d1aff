#pragma once
// parallel_for: at::parallel_for for snug's own sources, over the elements of many tensors at once. LibTorch's
// parallel_for is a template that runs in a single thread if compiled without OpenMP's flag. The shared precompiled
// header is compiled without the flag, so parallel.cpp alone is compiled with the flag.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace snug::detail {

/// Calls `part(i, begin, end)` for parts of [0, counts[i]) of every i, on LibTorch's threads. Each part belongs to a
/// single i and begins at a multiple of `grain`. The work is shared out as a whole, so many small counts cost no more
/// than a large count.
void parallel_for(const std::vector<int64_t>& counts, int64_t grain,
                  const std::function<void(size_t i, int64_t begin, int64_t end)>& part);

}  // namespace snug::detail
