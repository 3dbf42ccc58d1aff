#pragma once
// AllocationLog: a record of allocations and releases. The log can list the blocks that were alive at the peak, and
// does no work at each new peak. The log has plain data and no tensors.

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace snug::detail {

class AllocationLog {
 public:
  struct Block {
    const void* data;
    int64_t bytes;
    bool saved;  // saved for backward at some time
    bool alive;
  };

  void allocate(const void* data, int64_t bytes);
  /// Releasing a block that is older than the log only lowers the level.
  void release(const void* data, int64_t bytes);
  void mark_saved(const void* data);

  int64_t level() const { return level_; }
  int64_t peak() const { return peak_; }
  /// The blocks allocated since the log began and alive when the level was highest.
  std::vector<Block> alive_at_peak() const;
  /// Whether the block at `data`, alive now, was allocated since the log began.
  bool knows(const void* data) const { return live_.contains(data); }

 private:
  std::unordered_set<int64_t> ids_alive_at_peak() const;
  void forget_history();

  int64_t level_ = 0;
  int64_t peak_ = 0;
  int64_t next_id_ = 1;
  std::unordered_map<int64_t, Block> blocks_;
  std::unordered_map<const void*, int64_t> live_;  // by address
  std::vector<int64_t> events_;                    // id: allocated, -id: released
  size_t events_before_peak_ = 0;
  std::unordered_set<int64_t> alive_before_events_;
  // If peak_is_history_, the peak lies before events_, and alive_at_old_peak_ has the blocks alive at the peak.
  bool peak_is_history_ = false;
  std::unordered_set<int64_t> alive_at_old_peak_;
};

}  // namespace snug::detail
