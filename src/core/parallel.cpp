#include "src/core/parallel.h"

#include <algorithm>

#include <ATen/Parallel.h>

namespace snug::detail {

void parallel_for(const std::vector<int64_t>& counts, int64_t grain,
                  const std::function<void(size_t, int64_t, int64_t)>& part) {
  std::vector<int64_t> first_unit{0};  // in units of `grain` elements, with the units of all counts in a row
  for (const int64_t count : counts) {
    first_unit.push_back(first_unit.back() + (count + grain - 1) / grain);
  }
  at::parallel_for(0, first_unit.back(), 1, [&](int64_t begin, int64_t end) {
    auto i =
        static_cast<size_t>(std::upper_bound(first_unit.begin(), first_unit.end(), begin) - first_unit.begin()) - 1;
    while (begin < end) {
      const int64_t stop = std::min(end, first_unit[i + 1]);
      if (begin < stop) {
        part(i, (begin - first_unit[i]) * grain, std::min((stop - first_unit[i]) * grain, counts[i]));
      }
      begin = std::max(begin, stop);
      ++i;
    }
  });
}

}  // namespace snug::detail
