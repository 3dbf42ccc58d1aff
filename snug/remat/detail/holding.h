#pragma once
// Holding: where the bytes of a storage of an OpTape are, at its last version.
//
//   seen     the program or somebody else may hold the storage; it is found as long as anybody does
//   held     the tape holds the storage, too
//   parked   the tape has the memory, in no storage: the last tensor on it is gone, and it came back
//   away     a copy is in a store, whatever else is true

#include <cstdint>
#include <memory>
#include <utility>

#include <c10/core/Storage.h>

#include "snug/activations/detail/offload_store.h"

namespace snug::detail {

class Holding {
 public:
  explicit Holding(const c10::Storage& memory) : seen_(memory.getWeakStorageImpl()) {}

  /// Null: nobody holds it, or it is parked.
  c10::Storage find() const {
    if (held_) {
      return held_;
    }
    auto impl = seen_.lock();
    return impl ? c10::Storage(std::move(impl)) : c10::Storage();
  }
  bool is_in_use() const { return !seen_.expired(); }
  /// Where it was seen last. No other storage has this address while it is remembered here.
  const c10::StorageImpl* address() const { return seen_._unsafe_get_target(); }
  void see(const c10::Storage& memory) { seen_ = memory.getWeakStorageImpl(); }

  /// Held or parked; never both.
  bool is_own() const { return held_ || parked_; }
  bool is_parked() const { return static_cast<bool>(parked_); }
  void hold(c10::Storage memory) { held_ = std::move(memory); }
  void park(c10::DataPtr memory) { parked_ = std::move(memory); }
  /// It is neither any more. Returns what was held, or a storage of `bytes` of what was parked; null: it was neither.
  c10::Storage release(int64_t bytes) {
    if (!parked_) {
      return std::exchange(held_, {});
    }
    c10::DataPtr memory = std::move(parked_);
    parked_.clear();  // a DataPtr that was moved from keeps its address
    return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(memory));
  }

  bool is_away() const { return away_ != nullptr; }
  void put_away(std::unique_ptr<StoredAway> copy) { away_ = std::move(copy); }
  /// A new storage. It must be away.
  c10::Storage load() { return away_->load(); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> seen_;
  c10::Storage held_;
  c10::DataPtr parked_;
  std::unique_ptr<StoredAway> away_;
};

}  // namespace snug::detail
