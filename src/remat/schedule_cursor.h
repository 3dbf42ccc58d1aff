#pragma once
// ScheduleCursor: how far a step has followed the schedule. The forward pass follows the schedule operator by operator,
// up to the first operator that differs. A backward pass follows the schedule unpacking by unpacking, as long as the
// unpackings come in the scheduled order.

#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/remat/tape_schedule.h"

namespace snug::detail {

class ScheduleCursor {
 public:
  /// Null: nothing is scheduled.
  explicit ScheduleCursor(std::shared_ptr<const TapeSchedule> schedule);

  const TapeSchedule* schedule() const { return schedule_.get(); }
  /// Whether the schedule counts the bytes of a device.
  bool counts(c10::Device device) const { return schedule_ == nullptr || schedule_->device == device; }
  bool is_guess() const { return schedule_ != nullptr && schedule_->is_guess; }
  /// Null: nothing is scheduled for the storage, or the step deviated before the storage was made.
  const TapeSchedule::ForStorage* of(int storage) const;

  /// The scheduled operator that follows after `operators` operators; null: none.
  const TapeSchedule::Made* due(int operators) const;
  /// Notes that the step differs from the schedule, as `deviation` describes. Storages from `storage` on are not
  /// scheduled.
  void deviate(std::string deviation, int storage = std::numeric_limits<int>::max());
  /// The latest text given to deviate(); empty: no deviation.
  const std::string& deviation() const { return deviation_; }

  /// Backward pass number `pass` asks for a storage. True: the pass differs from the pass before, and begins at the
  /// first unpacking. A guess describes one pass, whatever the numbers.
  bool begin(int pass);
  /// Backward asks for a storage, or never will. After a request out of the scheduled order, nobody can tell which
  /// storages are still needed, unless the order was a guess.
  void arrive(int storage);
  /// The next unpacking that has come and was not yet returned in this pass; null: none.
  const TapeSchedule::Unpacking* next_to_let_go();
  /// Streamed storages whose load begins at the unpacking under way.
  std::span<const int> to_fetch() const;

  /// Whether the storage stays in memory if a replay makes the storage at the unpacking under way.
  bool stays_after_replay(const TapeSchedule::ForStorage& storage) const;
  /// Whether an unpacking that has not come yet needs the storage.
  bool is_needed_later(const TapeSchedule::ForStorage& storage) const { return storage.needed_until > reached_; }
  /// Whether the last unpacking that needs the storage was returned by next_to_let_go().
  bool is_let_go(const TapeSchedule::ForStorage& storage) const;

 private:
  int place_of(int storage) const;

  std::shared_ptr<const TapeSchedule> schedule_;
  std::string deviation_;
  int deviates_from_ = std::numeric_limits<int>::max();  // the first storage that is not scheduled
  int pass_ = -1;                                        // the backward pass under way
  bool is_in_order_ = true;                              // unpackings came in order so far
  std::vector<bool> arrived_;                            // per unpacking: has come
  int reached_ = -1;                                     // all unpackings up to this number have come
  int let_go_ = -1;                                      // all up to this number were returned by next_to_let_go()
  int place_ = -1;                                       // number of the unpacking under way; -1: not scheduled
};

}  // namespace snug::detail
