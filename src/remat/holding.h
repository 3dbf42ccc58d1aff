#pragma once
// Holding: the owner of the bytes of one storage of an OpTape, at the storage's last version.
//
//   gone     nobody has the bytes
//   seen     the program or somebody else holds the storage; can be found as long as anybody holds the storage
//   held     the tape holds the storage, too
//   parked   the tape has the memory without a storage: the last tensor is gone, and the memory came back to the tape
//
// In each state, a store may have a copy as well: the storage is "away".

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

  /// Null: the storage is gone or parked.
  c10::Storage find() const {
    if (const auto* held = std::get_if<c10::Storage>(&own_)) {
      return *held;
    }
    auto impl = seen_.lock();
    return impl ? c10::Storage(std::move(impl)) : c10::Storage();
  }
  bool is_in_use() const { return !seen_.expired(); }
  /// The address of the storage seen last. No other storage gets this address while the Holding remembers the address.
  const c10::StorageImpl* address() const { return seen_._unsafe_get_target(); }
  void see(const c10::Storage& memory) { seen_ = memory.getWeakStorageImpl(); }
  /// Forgets the storage: the new owner may write other values to the memory.
  void lose_sight() { seen_.reset(); }

  /// Whether the storage is held or parked.
  bool is_own() const { return !std::holds_alternative<std::monostate>(own_); }
  /// Whether nobody but the tape has the bytes in memory.
  bool is_only_own() const {
    const auto* held = std::get_if<c10::Storage>(&own_);
    return is_parked() || (held != nullptr && held->use_count() == 1);
  }
  bool is_parked() const { return std::holds_alternative<c10::DataPtr>(own_); }
  /// Null: the tape gives up the storage.
  void hold(c10::Storage memory) { own(memory ? Own(std::move(memory)) : Own()); }
  void park(c10::DataPtr memory) { own(std::move(memory)); }
  /// The tape gives up the storage. Returns the held storage, or a storage of `bytes` bytes on the parked memory; null:
  /// the storage was neither held nor parked.
  c10::Storage release(int64_t bytes) {
    Own before = std::exchange(own_, {});
    if (auto* parked = std::get_if<c10::DataPtr>(&before)) {
      return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(*parked));
    }
    auto* held = std::get_if<c10::Storage>(&before);
    return held != nullptr ? std::move(*held) : c10::Storage();
  }

  bool is_away() const { return away_ != nullptr; }
  /// Null: the store has no copy any more.
  void put_away(std::unique_ptr<StoredAway> copy) { away_ = std::move(copy); }
  StoredAway& away() { return *away_; }
  /// Returns a new storage with the copy's bytes. Requires is_away().
  c10::Storage load() { return away_->load(); }

 private:
  using Own = std::variant<std::monostate, c10::Storage, c10::DataPtr>;

  // The former memory is released last: the former memory may come back to the tape, and be parked here.
  void own(Own memory) { const Own before = std::exchange(own_, std::move(memory)); }

  c10::weak_intrusive_ptr<c10::StorageImpl> seen_;
  Own own_;
  std::unique_ptr<StoredAway> away_;
};

}  // namespace snug::detail
