#include "tests/support/sim_device/sim_allocator.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "tests/support/sim_device/sim_device.h"
#include "tests/support/sim_device/sim_stream.h"

namespace snug::sim_device {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;
constexpr auto kAllBlocks = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

struct Block {
  void* data = nullptr;
  size_t size = 0;
  size_t requested = 0;
  c10::Stream stream;                   // may use it without events
  std::vector<c10::Stream> users = {};  // other streams, noted by record_stream
  std::vector<Mark> awaited = {};       // where they were when it was freed
};

void poison(const Block& block) {
  enqueue(block.stream, 0, [data = block.data, size = block.size] { std::memset(data, 0xFF, size); });
}

class Pool {
 public:
  Block take(size_t bytes, c10::Stream stream) {
    const size_t size = (bytes + kBlock - 1) / kBlock * kBlock;
    give_back_passed();
    auto& fitting = free_[{stream.id(), size}];
    if (fitting.empty()) {
      return make(bytes, size, stream);
    }
    Block block = std::move(fitting.back());
    fitting.pop_back();
    block.requested = bytes;
    return block;
  }

  void give_back(Block block) {
    for (const c10::Stream user : std::exchange(block.users, {})) {
      block.awaited.push_back(end_of(user));
    }
    stats.allocated_bytes[kAllBlocks].decrease(block.size);
    stats.requested_bytes[kAllBlocks].decrease(block.requested);
    stats.allocation[kAllBlocks].decrease(1);
    waiting_.push_back(std::move(block));
    give_back_passed();
  }

  void count(const Block& block) {
    stats.allocated_bytes[kAllBlocks].increase(block.size);
    stats.requested_bytes[kAllBlocks].increase(block.requested);
    stats.allocation[kAllBlocks].increase(1);
    stats.active_bytes[kAllBlocks].increase(block.size);
  }

  // The tasks in the streams may still need the memory.
  void empty(c10::DeviceIndex index) {
    run_all(index);
    give_back_passed();
    run_all(index);
    for (const auto& [key, blocks] : std::exchange(free_, {})) {
      for (const Block& block : blocks) {
        std::free(block.data);
        stats.reserved_bytes[kAllBlocks].decrease(block.size);
        stats.segment[kAllBlocks].decrease(1);
        ++stats.num_device_free;
      }
    }
  }

  DeviceStats stats;
  int64_t limit = kTotalBytes;

 private:
  Block make(size_t bytes, size_t size, c10::Stream stream) {
    const auto fits = [&] { return stats.reserved_bytes[kAllBlocks].current + static_cast<int64_t>(size) <= limit; };
    if (!fits()) {
      ++stats.num_alloc_retries;
      empty(stream.device_index());
    }
    if (!fits()) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes, of ", limit,
                       " are ", stats.allocated_bytes[kAllBlocks].current, " allocated");
    }
    stats.reserved_bytes[kAllBlocks].increase(size);
    stats.segment[kAllBlocks].increase(1);
    ++stats.num_device_alloc;
    void* const data = std::aligned_alloc(kBlock, size);
    std::memset(data, 0xFF, size);
    return {data, size, bytes, stream};
  }

  void give_back_passed() {
    for (auto block = waiting_.begin(); block != waiting_.end();) {
      if (!std::ranges::all_of(block->awaited, has_passed)) {
        ++block;
        continue;
      }
      block->awaited.clear();
      stats.active_bytes[kAllBlocks].decrease(block->size);
      poison(*block);
      free_[{block->stream.id(), block->size}].push_back(std::move(*block));
      block = waiting_.erase(block);
    }
  }

  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block>> free_;
  std::list<Block> waiting_;  // freed, but other streams may still use them
};

struct Memory {
  std::array<Pool, kDevices> pools;
  std::unordered_map<void*, Block> live;
  int64_t countdown = 0;
};

Memory& memory() {
  static auto* const made = new Memory;  // tensors may outlive the program's end
  return *made;
}

Pool& pool_of(c10::DeviceIndex index) { return memory().pools.at(static_cast<size_t>(index)); }

void report(const Block& block, int64_t bytes) {
  const auto& stats = pool_of(block.stream.device_index()).stats;
  c10::reportMemoryUsageToProfiler(block.data, bytes, static_cast<size_t>(stats.allocated_bytes[kAllBlocks].current),
                                   static_cast<size_t>(stats.reserved_bytes[kAllBlocks].current),
                                   block.stream.device());
}

void give_back(void* data) {
  if (data == nullptr) {
    return;
  }
  const std::lock_guard lock(device_mutex());
  auto node = memory().live.extract(data);
  Block& block = node.mapped();
  Pool& pool = pool_of(block.stream.device_index());
  const Block reported{block.data, block.size, block.requested, block.stream};
  pool.give_back(std::move(block));
  report(reported, -static_cast<int64_t>(reported.size));
}

class Allocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = current_device();
    if (bytes == 0) {
      return {nullptr, nullptr, &give_back, device(index)};
    }
    const std::lock_guard lock(device_mutex());
    if (int64_t& countdown = memory().countdown; countdown > 0 && --countdown == 0) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: the test made this allocation fail");
    }
    Pool& pool = pool_of(index);
    Block block = pool.take(bytes, current_stream(index));
    pool.count(block);
    report(block, static_cast<int64_t>(block.size));
    void* const data = block.data;
    memory().live.emplace(data, std::move(block));
    return {data, data, &give_back, device(index)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  void emptyCache(c10::MempoolId_t) override {
    const std::lock_guard lock(device_mutex());
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
      pool_of(index).empty(index);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const std::lock_guard lock(device_mutex());
    return pool_of(index).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    for_each_stat(index, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    for_each_stat(index, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const std::lock_guard lock(device_mutex());
    return {kTotalBytes - pool_of(index).stats.reserved_bytes[kAllBlocks].current, kTotalBytes};
  }

 private:
  template <typename Change>
  static void for_each_stat(c10::DeviceIndex index, const Change& change) {
    const std::lock_guard lock(device_mutex());
    DeviceStats& of = pool_of(index).stats;
    for (auto* stat : {&of.allocation, &of.segment, &of.allocated_bytes, &of.reserved_bytes, &of.active_bytes,
                       &of.requested_bytes}) {
      change((*stat)[kAllBlocks]);
    }
  }
};

Allocator* allocator() {
  static auto* const made = new Allocator;
  return made;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, allocator())

}  // namespace

c10::Allocator* device_allocator() { return allocator(); }

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get() == nullptr || data.get_deleter() != &give_back) {
    return;
  }
  const std::lock_guard lock(device_mutex());
  Block& block = memory().live.at(data.get());
  if (stream != block.stream && std::ranges::find(block.users, stream) == block.users.end()) {
    block.users.push_back(stream);
  }
}

bool is_device_pointer(const void* pointer) {
  const std::lock_guard lock(device_mutex());
  return memory().live.contains(const_cast<void*>(pointer));
}

DeviceStats stats(c10::Device of) { return allocator()->getDeviceStats(of.index()); }

int64_t set_limit(int64_t bytes, c10::Device of) {
  const std::lock_guard lock(device_mutex());
  return std::exchange(pool_of(of.index()).limit, bytes);
}

int64_t fail_after(int64_t countdown) {
  const std::lock_guard lock(device_mutex());
  return std::exchange(memory().countdown, countdown);
}

FailingAllocation::FailingAllocation(int64_t countdown) { fail_after(countdown); }

FailingAllocation::~FailingAllocation() { fail_after(0); }

bool FailingAllocation::has_failed() {
  const std::lock_guard lock(device_mutex());
  return memory().countdown == 0;
}

}  // namespace snug::sim_device
