#pragma once
// BlockCache: released blocks of memory, kept for the next request of exactly the same size. A training step asks for
// the same sizes again and again. A block that went back to the operating system in between costs a page fault for each
// page of the block.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <unordered_map>

namespace snug::detail {

/// A thread-safe cache that neither reads nor writes the blocks' memory. Calls `give_back` for each block that leaves
/// the cache without being taken.
class BlockCache {
 public:
  explicit BlockCache(void (*give_back)(void* block)) : give_back_(give_back) {}
  ~BlockCache() { shrink(0); }
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// The block of `bytes` that was put in last, because the pages of the latest block are the likeliest to be in a
  /// processor's cache. Returns nullptr if the cache has no block of `bytes`.
  void* take(size_t bytes);
  /// Adds the block to the cache, or gives the block back at once if no memory is left to note the block.
  void put(void* block, size_t bytes) noexcept;
  /// Gives back blocks, the oldest first, until at most `bytes` are left.
  void shrink(int64_t bytes) noexcept;

  /// Bytes of all blocks in the cache.
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };
  using Blocks = std::list<Block>;

  void (*give_back_)(void*);
  std::mutex mutex_;
  Blocks blocks_;                                                     // the oldest first
  std::unordered_map<size_t, std::deque<Blocks::iterator>> by_size_;  // the oldest first
  std::atomic<int64_t> bytes_{0};
};

}  // namespace snug::detail
