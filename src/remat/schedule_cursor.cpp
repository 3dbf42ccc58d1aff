#include "src/remat/schedule_cursor.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace snug::detail {

ScheduleCursor::ScheduleCursor(std::shared_ptr<const TapeSchedule> schedule)
    : schedule_(std::move(schedule)), arrived_(schedule_ ? schedule_->unpackings.size() : 0, false) {}

const TapeSchedule::ForStorage* ScheduleCursor::of(int storage) const {
  const bool is_scheduled =
      schedule_ != nullptr && storage < deviates_from_ && storage < std::ssize(schedule_->storages);
  return is_scheduled ? &schedule_->storages[static_cast<size_t>(storage)] : nullptr;
}

const TapeSchedule::Made* ScheduleCursor::due(int operators) const {
  const bool is_any = schedule_ != nullptr && operators < std::ssize(schedule_->operators);
  return is_any ? &schedule_->operators[static_cast<size_t>(operators)] : nullptr;
}

void ScheduleCursor::deviate(std::string deviation, int storage) {
  deviation_ = std::move(deviation);
  deviates_from_ = std::min(deviates_from_, storage);
}

bool ScheduleCursor::begin(int pass) {
  if (pass == std::exchange(pass_, pass) || is_guess()) {
    return false;
  }
  arrived_.assign(arrived_.size(), false);
  reached_ = let_go_ = place_ = -1;
  is_in_order_ = deviation_.empty();
  return true;
}

void ScheduleCursor::arrive(int storage) {
  if (schedule_ == nullptr || !is_in_order_) {
    return;
  }
  place_ = place_of(storage);
  is_in_order_ = deviation_.empty() && (place_ >= 0 || is_guess());
  if (place_ >= 0) {
    arrived_[static_cast<size_t>(place_)] = true;
  }
  while (reached_ + 1 < std::ssize(arrived_) && arrived_[static_cast<size_t>(reached_) + 1]) {
    ++reached_;
  }
}

int ScheduleCursor::place_of(int storage) const {
  if (!is_guess()) {
    const int due = reached_ + 1;
    const bool is_due =
        due < std::ssize(schedule_->unpackings) && schedule_->unpackings[static_cast<size_t>(due)].storage == storage;
    return is_due ? due : -1;
  }
  const TapeSchedule::ForStorage* scheduled = of(storage);
  for (size_t i = 0; scheduled != nullptr && i < scheduled->unpacked_at.size(); ++i) {
    if (!arrived_[static_cast<size_t>(scheduled->unpacked_at[i])]) {
      return scheduled->unpacked_at[i];
    }
  }
  return -1;
}

const TapeSchedule::Unpacking* ScheduleCursor::next_to_let_go() {
  if (!is_in_order_ || let_go_ == reached_) {
    return nullptr;
  }
  return &schedule_->unpackings[static_cast<size_t>(++let_go_)];
}

std::span<const int> ScheduleCursor::to_fetch() const {
  const bool is_known = is_in_order_ && place_ >= 0 && !is_guess();
  return is_known ? std::span<const int>(schedule_->unpackings[static_cast<size_t>(place_)].fetches)
                  : std::span<const int>();
}

bool ScheduleCursor::stays_after_replay(const TapeSchedule::ForStorage& storage) const {
  return is_in_order_ && place_ >= 0 && storage.hold_from <= place_ && is_needed_later(storage);
}

bool ScheduleCursor::is_let_go(const TapeSchedule::ForStorage& storage) const {
  const int last = std::max(storage.needed_until, storage.unpacked_at.empty() ? -1 : storage.unpacked_at.back());
  return last >= 0 && last <= let_go_;
}

}  // namespace snug::detail
