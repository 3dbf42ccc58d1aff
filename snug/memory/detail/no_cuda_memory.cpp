#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/memory/detail/cuda_memory.h"

namespace snug::detail {

double set_cuda_limit(c10::Device device, int64_t) {
  throw ConfigError(fmt::format(
      "MemoryLimit: cannot cap {}: this snug was built without CUDA; build it with SNUG_CUDA=ON", device.str()));
}

void restore_cuda_fraction(c10::Device, double) noexcept {}

}  // namespace snug::detail
