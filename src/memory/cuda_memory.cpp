#include <algorithm>
#include <map>
#include <memory>

#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/memory/device_memory.h"

// LibTorch's header of getDeviceProperties includes cuBLAS's and cuSPARSE's headers.
namespace at::cuda {
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device);
}

// A cap is the caching allocator's memory fraction, a part of totalGlobalMem. The fraction also counts the blocks that
// the allocator keeps.

namespace snug::detail {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

class CudaMemory final : public AcceleratorMemory {
  // A page of large blocks (20 MiB) and a page of small blocks (2 MiB) are partly free.
  int64_t gaps() const override { return 22 << 20; }
  bool has_cap() const override { return true; }

  void enforce(c10::Device device, int64_t bytes) override {
    const auto index = device.index();
    const double before = before_.try_emplace(index, allocator::getMemoryFraction(index)).first->second;
    if (bytes == kNoLimit) {
      allocator::setMemoryFraction(before, index);
      before_.erase(index);  // other code may set the fraction until the next cap
      return;
    }
    const auto total = static_cast<int64_t>(at::cuda::getDeviceProperties(index)->totalGlobalMem);
    if (bytes > total) {
      throw ConfigError(fmt::format("MemoryLimit: {} is more than {} has ({}); give less", Bytes(bytes).str(),
                                    device.str(), Bytes(total).str()));
    }
    allocator::setMemoryFraction(std::min(before, static_cast<double>(bytes) / static_cast<double>(total)), index);
  }

  std::map<c10::DeviceIndex, double> before_;  // the fraction that was set before the first cap
};

[[maybe_unused]] const bool is_registered = [] {
  register_device_memory(c10::DeviceType::CUDA, std::make_unique<CudaMemory>());
  return true;
}();

}  // namespace
}  // namespace snug::detail
