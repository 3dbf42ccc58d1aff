#include <algorithm>
#include <memory>

#include "snug/memory/detail/device_memory.h"
#include "tests/support/sim_device/sim_device.h"

// The simulated accelerator has caps, as CUDA has.

namespace snug::sim_device {
namespace {

class SimMemory final : public detail::AcceleratorMemory {
  void enforce(c10::Device device, int64_t bytes) override { set_limit(std::min(bytes, kTotalBytes), device); }
};

[[maybe_unused]] const bool memory_is_registered = [] {
  detail::register_device_memory(device().type(), std::make_unique<SimMemory>());
  return true;
}();

}  // namespace
}  // namespace snug::sim_device
