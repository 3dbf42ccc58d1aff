#pragma once
// Holding: where the bytes of a storage of an OpTape are, at its last version.
//
//   gone     nobody has them
//   seen     the program or somebody else holds the storage; it is found as long as anybody does
//   held     the tape holds the storage, too
//   parked   the tape has the memory, in no storage: the last tensor on it is gone, and it came back
//
// Besides, a copy may be away, in a store.

#include <cstdint>
#include <memory>
#include <utility>
#include <variant>

#include <c10/core/Storage.h>

#include "src/activations/offload_store.h"

namespace snug::detail {

class Holding {
 public:
  explicit Holding(const c10::Storage& memory) : seen_(memory.getWeakStorageImpl()) {}

  /// Null: it is gone or parked.
  c10::Storage find() const {
    if (const auto* held = std::get_if<c10::Storage>(&own_)) {
      return *held;
    }
    auto impl = seen_.lock();
    return impl ? c10::Storage(std::move(impl)) : c10::Storage();
  }
  bool is_in_use() const { return !seen_.expired(); }
  /// Where it was seen last. No other storage has this address while it is remembered here.
  const c10::StorageImpl* address() const { return seen_._unsafe_get_target(); }
  void see(const c10::Storage& memory) { seen_ = memory.getWeakStorageImpl(); }
  /// It is somebody's who may write other values there.
  void lose_sight() { seen_.reset(); }

  /// Held or parked.
  bool is_own() const { return !std::holds_alternative<std::monostate>(own_); }
  bool is_parked() const { return std::holds_alternative<c10::DataPtr>(own_); }
  /// Null: the tape has it no longer.
  void hold(c10::Storage memory) { own(memory ? Own(std::move(memory)) : Own()); }
  void park(c10::DataPtr memory) { own(std::move(memory)); }
  /// The tape has it no longer. Returns what was held, or a storage of `bytes` of what was parked; null: it was
  /// neither.
  c10::Storage release(int64_t bytes) {
    Own before = std::exchange(own_, {});
    if (auto* parked = std::get_if<c10::DataPtr>(&before)) {
      return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(*parked));
    }
    auto* held = std::get_if<c10::Storage>(&before);
    return held != nullptr ? std::move(*held) : c10::Storage();
  }

  bool is_away() const { return away_ != nullptr; }
  /// Null: there is no copy any more.
  void put_away(std::unique_ptr<StoredAway> copy) { away_ = std::move(copy); }
  StoredAway& away() { return *away_; }
  /// A new storage. It must be away.
  c10::Storage load() { return away_->load(); }

 private:
  using Own = std::variant<std::monostate, c10::Storage, c10::DataPtr>;

  // What was there before goes last: its memory may come back to the tape, and be parked here.
  void own(Own memory) { const Own before = std::exchange(own_, std::move(memory)); }

  c10::weak_intrusive_ptr<c10::StorageImpl> seen_;
  Own own_;
  std::unique_ptr<StoredAway> away_;
};

}  // namespace snug::detail
