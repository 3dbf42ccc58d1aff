#include "tests/support/sim_device/sim_pinned.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/CachingHostAllocator.h>

#include "tests/support/sim_device/sim_device.h"
#include "tests/support/sim_device/sim_stream.h"

namespace snug::sim_device {
namespace {

struct PinnedBlock {
  size_t size = 0;
  std::vector<c10::Stream> users = {};
};

std::map<const char*, PinnedBlock>& pinned_blocks() {
  static auto* const blocks = new std::map<const char*, PinnedBlock>;
  return *blocks;
}

// The block that the pointer lies in, or the end.
auto find_pinned(const void* pointer) {
  auto& blocks = pinned_blocks();
  const auto* const at = static_cast<const char*>(pointer);
  auto block = blocks.upper_bound(at);
  if (block == blocks.begin()) {
    return blocks.end();
  }
  --block;
  return at < block->first + block->second.size ? block : blocks.end();
}

int64_t& failing_countdown() {
  static int64_t countdown = 0;
  return countdown;
}

// Freed, but tasks that have not run may use them.
struct WaitingBlock {
  void* data;
  std::vector<Mark> awaited;
};

std::vector<WaitingBlock>& waiting_blocks() {
  static auto* const blocks = new std::vector<WaitingBlock>;
  return *blocks;
}

void free_passed() {
  std::erase_if(waiting_blocks(), [](const WaitingBlock& block) {
    const bool is_free = std::ranges::all_of(block.awaited, has_passed);
    if (is_free) {
      std::free(block.data);
    }
    return is_free;
  });
}

void free_pinned(void* data) {
  if (data == nullptr) {
    return;
  }
  const std::lock_guard lock(device_mutex());
  const auto node = pinned_blocks().extract(static_cast<const char*>(data));
  WaitingBlock block{data, {}};
  for (const c10::Stream user : node.mapped().users) {
    block.awaited.push_back(end_of(user));
  }
  waiting_blocks().push_back(std::move(block));
  free_passed();
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_pinned, c10::DeviceType::CPU};
    }
    const std::lock_guard lock(device_mutex());
    TORCH_CHECK_WITH(OutOfMemoryError, failing_countdown() == 0 || --failing_countdown() > 0,
                     "sim_device: this allocation of pinned memory was made to fail");
    const size_t size = (bytes + kBlock - 1) / kBlock * kBlock;
    void* const data = std::aligned_alloc(kBlock, size);
    pinned_blocks().emplace(static_cast<const char*>(data), PinnedBlock{size});
    return {data, data, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  bool record_event(void* data, void*, c10::Stream stream) override { return use_pinned(data, stream); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator* pinned() {
  static auto* const made = new PinnedAllocator;
  return made;
}

REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, pinned())

}  // namespace

c10::Allocator* pinned_allocator() { return pinned(); }

int64_t fail_pinned_after(int64_t countdown) {
  const std::lock_guard lock(device_mutex());
  return std::exchange(failing_countdown(), countdown);
}

bool use_pinned(const void* pointer, c10::Stream stream) {
  const std::lock_guard lock(device_mutex());
  const auto block = find_pinned(pointer);
  if (block == pinned_blocks().end()) {
    return false;
  }
  auto& users = block->second.users;
  if (std::ranges::find(users, stream) == users.end()) {
    users.push_back(stream);
  }
  return true;
}

bool is_pinned_pointer(const void* pointer) {
  const std::lock_guard lock(device_mutex());
  return find_pinned(pointer) != pinned_blocks().end();
}

}  // namespace snug::sim_device
