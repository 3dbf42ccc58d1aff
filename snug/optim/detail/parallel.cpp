#include "snug/optim/detail/parallel.h"

#include <algorithm>

#include <ATen/Parallel.h>

namespace snug::detail {

// Divided in units of `grain`, so that no part begins inside of one.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& part) {
  const int64_t units = (count + grain - 1) / grain;
  at::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) { part(begin * grain, std::min(end * grain, count)); });
}

}  // namespace snug::detail
