#include <algorithm>
#include <memory>
#include <utility>

#include "snug/memory/detail/device_memory.h"
#include "tests/support/sim_device/sim_device.h"

// The simulated accelerator has caps, as CUDA has, or none, as a test wants it.

namespace snug::sim_device {
namespace {

bool allocator_has_cap = true;

class SimMemory final : public detail::AcceleratorMemory {
  int64_t fail_after(int64_t countdown) override { return sim_device::fail_after(countdown); }
  bool has_cap() const override { return allocator_has_cap; }
  void enforce(c10::Device device, int64_t bytes) override {
    if (allocator_has_cap) {
      set_limit(std::min(bytes, kTotalBytes), device);
    } else {
      AcceleratorMemory::enforce(device, bytes);
    }
  }
};

[[maybe_unused]] const bool memory_is_registered = [] {
  detail::register_device_memory(device().type(), std::make_unique<SimMemory>());
  return true;
}();

}  // namespace

WithCap::WithCap(bool has_cap) : before_(std::exchange(allocator_has_cap, has_cap)) {}

WithCap::~WithCap() { allocator_has_cap = before_; }

}  // namespace snug::sim_device
