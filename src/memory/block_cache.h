#pragma once
// BlockCache: released blocks of memory, kept for the next request of exactly the same size. A training step asks for
// the same sizes again and again. A block that went back to the operating system in between costs a page fault for each
// of its pages.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <list>
#include <mutex>
#include <unordered_map>

namespace snug::detail {

/// Thread-safe. It reads and writes none of the blocks' memory. `give_back` is called for each block that leaves the
/// cache without being taken.
class BlockCache {
 public:
  explicit BlockCache(void (*give_back)(void* block)) : give_back_(give_back) {}
  ~BlockCache() { shrink(0); }
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// The block of that size that was put in last, because its pages are the likeliest to be in a processor's cache;
  /// nullptr if there is none.
  void* take(size_t bytes);
  /// Adds the block to the cache, or gives it back at once if there is no memory to note it.
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
  Blocks blocks_;                                                     // in the order in which they came
  std::unordered_map<size_t, std::deque<Blocks::iterator>> by_size_;  // likewise
  std::atomic<int64_t> bytes_{0};
};

}  // namespace snug::detail
