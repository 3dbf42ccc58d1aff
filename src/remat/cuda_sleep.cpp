#include <ATen/cuda/Sleep.h>

#include "src/remat/operator_clock.h"

// An idle CUDA device sleeps before an operator is timed. Not run on a GPU yet.

namespace snug::detail {
namespace {

constexpr int64_t kCycles = 4'000'000;  // about 2 ms: longer than the host takes to call the operators of a span

[[maybe_unused]] const bool is_registered = [] {
  set_device_sleep([] { at::cuda::sleep(kCycles); });
  return true;
}();

}  // namespace
}  // namespace snug::detail
