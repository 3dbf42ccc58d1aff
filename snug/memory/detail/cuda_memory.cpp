#include "snug/memory/detail/cuda_memory.h"

#include <algorithm>

#include <c10/cuda/CUDACachingAllocator.h>
#include <fmt/format.h>

#include "snug/core/bytes.h"
#include "snug/core/error.h"

namespace snug::detail {

double set_cuda_limit(c10::Device device, int64_t bytes) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  const auto index = device.index();
  const auto total = static_cast<double>(allocator::get()->getMemoryInfo(index).second);
  const double previous = allocator::getMemoryFraction(index);
  const double fraction = static_cast<double>(bytes) / total;
  if (fraction > 1.0) {
    throw ConfigError(fmt::format("MemoryLimit: {} is more than {} has ({}); give less", Bytes(bytes).str(),
                                  device.str(), Bytes(static_cast<int64_t>(total)).str()));
  }
  allocator::setMemoryFraction(std::min(previous, fraction), index);
  return previous;
}

void restore_cuda_fraction(c10::Device device, double fraction) noexcept {
  c10::cuda::CUDACachingAllocator::setMemoryFraction(fraction, device.index());
}

}  // namespace snug::detail
