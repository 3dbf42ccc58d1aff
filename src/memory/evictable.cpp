#include "src/memory/evictable.h"

#include <utility>
#include <vector>

namespace snug::detail {
namespace {

thread_local std::vector<std::weak_ptr<Evictable>> owners;
thread_local int64_t all_released = 0;

}  // namespace

void add_evictable(std::weak_ptr<Evictable> owner) {
  std::erase_if(owners, [](const auto& one) { return one.expired(); });
  owners.push_back(std::move(owner));
}

bool evict(int64_t bytes) {
  int64_t released = 0;
  for (size_t i = 0; i < owners.size() && released < bytes; ++i) {
    if (const auto owner = owners[i].lock()) {
      released += owner->evict(bytes - released);
    }
  }
  all_released += released;
  return released > 0;
}

int64_t evicted_bytes() { return all_released; }

}  // namespace snug::detail
