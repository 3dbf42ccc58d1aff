#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "src/memory/device_memory.h"
#include "tests/support/sim_device/sim_allocator.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/sim_device/sim_stream.h"

// The simulated accelerator has caps, as CUDA has, or none, as a test wants it; and workspaces of products, as CUDA
// has.

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

using Workspaces = std::map<c10::StreamId, c10::DataPtr>;
std::optional<Workspaces> workspaces;

}  // namespace

WithCap::WithCap(bool has_cap) : before_(std::exchange(allocator_has_cap, has_cap)) {}

WithCap::~WithCap() { allocator_has_cap = before_; }

void take_workspace(const std::string& op, c10::Stream stream) {
  const std::lock_guard lock(device_mutex());
  const bool is_product = op == "aten::mm" || op == "aten::addmm" || op == "aten::bmm" || op == "aten::baddbmm";
  if (workspaces && is_product && !workspaces->contains(stream.id())) {
    workspaces->emplace(stream.id(), device_allocator()->allocate(kWorkspaceBytes));
  }
}

ProductWorkspaces::ProductWorkspaces() { workspaces.emplace(); }
ProductWorkspaces::~ProductWorkspaces() { workspaces.reset(); }

}  // namespace snug::sim_device
