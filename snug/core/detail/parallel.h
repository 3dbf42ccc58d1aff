#pragma once
// parallel_for: at::parallel_for for sources of snug's own, over the elements of many tensors at once. LibTorch's is a template that runs in
// one thread where it is compiled without OpenMP's flag, which the shared precompiled header does not have; so it is compiled with it
// once, here.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace snug::detail {

/// Calls `part(i, begin, end)` for parts of [0, counts[i]) of every i, on LibTorch's threads: each part is of one i, and begins at a
/// multiple of `grain`. The work is shared out as a whole, so that many small counts cost no more than a large one.
void parallel_for(const std::vector<int64_t>& counts, int64_t grain,
                  const std::function<void(size_t i, int64_t begin, int64_t end)>& part);

}  // namespace snug::detail
