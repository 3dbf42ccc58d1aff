#include "snug/activations/detail/segments.h"

#include <limits>

namespace snug::detail {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// For each number of layers, the least bytes of inputs with which they can be cut so that no segment passes `peak`, and where the last of
// these segments begins. Holding fewer inputs is never worse for what follows, so the least is all there is to know.
struct Cuts {
  std::vector<int64_t> held;
  std::vector<size_t> begin;

  Cuts(const ChainBytes& bytes, int64_t peak)
      : held(bytes.inputs.size() + 1, kNever), begin(bytes.inputs.size() + 1, 0) {
    held[0] = 0;
    for (size_t end = 1; end < held.size(); ++end) {
      for (size_t first = 0; first < end; ++first) {
        if (held[first] == kNever) {
          continue;
        }
        const int64_t now = held[first] + bytes.inputs[first];
        if (now + bytes.inside[first][end - 1] <= peak && now < held[end]) {
          held[end] = now;
          begin[end] = first;
        }
      }
    }
    for (size_t first = 0; first + 1 < held.size(); ++first) {  // the longest last segment
      if (held[first] != kNever && held[first] + bytes.inputs[first] + bytes.inside[first].back() <= peak) {
        begin.back() = first;
        break;
      }
    }
  }
  bool are_possible() const { return held.back() != kNever; }
};

}  // namespace

std::vector<size_t> least_peak_segments(const ChainBytes& bytes) {
  const size_t n = bytes.inputs.size();
  int64_t too_low = -1;
  int64_t peak = bytes.inputs[0] + bytes.inside[0][n - 1];  // one segment
  while (peak - too_low > 1) {
    const int64_t middle = too_low + (peak - too_low) / 2;
    (Cuts(bytes, middle).are_possible() ? peak : too_low) = middle;
  }
  const Cuts cuts(bytes, peak);
  std::vector<size_t> ends;
  for (size_t end = n; end > 0; end = cuts.begin[end]) {
    ends.insert(ends.begin(), end);
  }
  return ends;
}

}  // namespace snug::detail
