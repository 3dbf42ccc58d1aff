#pragma once
// ScheduleCursor: how far a step has followed its schedule. The forward pass follows it operator by operator, until the
// first that is another; a backward pass, unpacking by unpacking, as long as they come in the scheduled order.

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
  /// Null: nothing is scheduled for this storage, or the step deviated before it was made.
  const TapeSchedule::ForStorage* of(int storage) const;

  /// The operator that comes after so many; null: none.
  const TapeSchedule::Made* due(size_t operators) const;
  /// The step is another one than was scheduled: see deviation(). Storages from `storage` on are not scheduled.
  void deviate(std::string deviation, int storage = std::numeric_limits<int>::max());
  /// In words; empty: there was none.
  const std::string& deviation() const { return deviation_; }

  /// A backward pass of this number asks. True: it is another than before, and begins at the first unpacking. A guess
  /// is of one pass, whatever its numbers.
  bool begin(int pass);
  /// Backward asks for a storage, or never will. In an order that is not scheduled nobody knows which storages are
  /// needed, unless the order was a guess.
  void arrive(int storage);
  /// The next unpacking that has come, and was not returned in this pass; null: none.
  const TapeSchedule::Unpacking* next_to_let_go();
  /// Streams whose way back begins at the unpacking under way.
  std::span<const int> to_fetch() const;

  /// Of a scheduled storage, at the unpacking under way: a replay that makes it leaves it there.
  bool stays_after_replay(const TapeSchedule::ForStorage& storage) const;
  /// An unpacking that has not come yet needs it.
  bool is_needed_later(const TapeSchedule::ForStorage& storage) const { return storage.needed_until > reached_; }
  /// The last unpacking that needs it was let go.
  bool is_let_go(const TapeSchedule::ForStorage& storage) const;

 private:
  int place_of(int storage) const;

  std::shared_ptr<const TapeSchedule> schedule_;
  std::string deviation_;
  int deviates_from_ = std::numeric_limits<int>::max();  // the first storage that is not scheduled
  int pass_ = -1;                                        // the backward pass under way
  bool is_in_order_ = true;                              // so far
  std::vector<bool> arrived_;                            // per unpacking: it has come
  int reached_ = -1;                                     // all up to this one have
  int let_go_ = -1;                                      // all up to this one were returned by next_to_let_go()
  int place_ = -1;                                       // of the unpacking under way; -1: it is not scheduled
};

}  // namespace snug::detail
