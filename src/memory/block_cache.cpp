#include "src/memory/block_cache.h"

#include <iterator>

namespace snug::detail {

void* BlockCache::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = by_size_.find(bytes);
  if (found == by_size_.end()) {
    return nullptr;
  }
  const Blocks::iterator block = found->second.back();
  found->second.pop_back();
  if (found->second.empty()) {
    by_size_.erase(found);
  }
  void* const memory = block->memory;
  blocks_.erase(block);
  bytes_ -= static_cast<int64_t>(bytes);
  return memory;
}

void BlockCache::put(void* block, size_t bytes) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    auto& same = by_size_[bytes];
    blocks_.push_back({block, bytes});
    try {
      same.push_back(std::prev(blocks_.end()));
    } catch (...) {
      blocks_.pop_back();
      throw;
    }
    bytes_ += static_cast<int64_t>(bytes);
  } catch (...) {
    give_back_(block);
  }
}

void BlockCache::shrink(int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  while (bytes_ > bytes && !blocks_.empty()) {
    const Block oldest = blocks_.front();
    const auto same = by_size_.find(oldest.bytes);
    same->second.pop_front();
    if (same->second.empty()) {
      by_size_.erase(same);
    }
    blocks_.pop_front();
    bytes_ -= static_cast<int64_t>(oldest.bytes);
    give_back_(oldest.memory);
  }
}

}  // namespace snug::detail
