#include "src/memory/allocation_log.h"

namespace snug::detail {

// Past this many events the history is folded into two sets, so that a meter may live as long as a training run.
constexpr size_t kMaxEvents = size_t{1} << 20;

void AllocationLog::allocate(const void* data, int64_t bytes) {
  const int64_t id = next_id_++;
  blocks_[id] = {data, bytes, false, true};
  live_[data] = id;
  events_.push_back(id);
  level_ += bytes;
  if (level_ > peak_) {
    peak_ = level_;
    events_before_peak_ = events_.size();
    peak_is_history_ = false;
  }
}

void AllocationLog::release(const void* data, int64_t bytes) {
  level_ -= bytes;
  const auto found = live_.find(data);
  if (found == live_.end()) {
    return;
  }
  blocks_[found->second].alive = false;
  events_.push_back(-found->second);
  live_.erase(found);
  if (events_.size() >= kMaxEvents) {
    forget_history();
  }
}

void AllocationLog::mark_saved(const void* data) {
  const auto found = live_.find(data);
  if (found != live_.end()) {
    blocks_[found->second].saved = true;
  }
}

std::unordered_set<int64_t> AllocationLog::ids_alive_at_peak() const {
  if (peak_is_history_) {
    return alive_at_old_peak_;
  }
  auto alive = alive_before_events_;
  for (size_t i = 0; i < events_before_peak_; ++i) {
    if (events_[i] > 0) {
      alive.insert(events_[i]);
    } else {
      alive.erase(-events_[i]);
    }
  }
  return alive;
}

std::vector<AllocationLog::Block> AllocationLog::alive_at_peak() const {
  std::vector<Block> result;
  for (const int64_t id : ids_alive_at_peak()) {
    result.push_back(blocks_.at(id));
  }
  return result;
}

void AllocationLog::forget_history() {
  alive_at_old_peak_ = ids_alive_at_peak();
  peak_is_history_ = true;
  alive_before_events_.clear();
  for (const auto& [data, id] : live_) {
    alive_before_events_.insert(id);
  }
  std::erase_if(blocks_,
                [&](const auto& entry) { return !entry.second.alive && !alive_at_old_peak_.contains(entry.first); });
  events_.clear();
  events_before_peak_ = 0;
}

}  // namespace snug::detail
