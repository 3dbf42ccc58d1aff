#pragma once
// Evictable: an owner of memory with contents that can be made again. Before a limit refuses an allocation on the CPU,
// the owners of the thread are asked for room.

#include <cstdint>
#include <memory>

namespace snug::detail {

class Evictable {
 public:
  virtual ~Evictable() = default;
  /// Releases `bytes` bytes or more of CPU memory, or as much as possible. Called in the middle of an allocation.
  /// Returns the number of released bytes.
  virtual int64_t evict(int64_t bytes) = 0;
};

/// From now on, allocations of this thread ask `owner`, until the end of the owner. Allocations of other threads do
/// not, such as those of autograd's own threads for a device.
void add_evictable(std::weak_ptr<Evictable> owner);

/// Asks the owners of this thread for room. False: nothing was released.
bool evict(int64_t bytes);
/// The bytes that the owners of this thread have released so far.
int64_t evicted_bytes();

}  // namespace snug::detail
