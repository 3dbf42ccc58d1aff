#pragma once
// TapeStorages: the storages of an OpTape, and their owners. tape_storages.cpp says how a storage changes owners,
// tape_streams.cpp how streams of a device meet, and tape_region.cpp what a region keeps and copies.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/flat_hash_map.h>

#include "snug/checkpoint.h"
#include "src/activations/offload_store.h"
#include "src/planner/profile.h"
#include "src/remat/tape_operator.h"
#include "src/remat/tape_state.h"
#include "src/remat/tape_storage.h"

namespace snug::detail {

/// Watched memory holds a weak pointer to the TapeStorages, and may come back on any thread.
class TapeStorages : public std::enable_shared_from_this<TapeStorages> {
 public:
  explicit TapeStorages(std::shared_ptr<TapeState> state);

  // Numbers.
  TapeStorage& at(int storage) { return storages_[static_cast<size_t>(storage)]; }
  const TapeStorage& at(int storage) const { return storages_[static_cast<size_t>(storage)]; }
  int size() const { return static_cast<int>(storages_.size()); }
  /// Null: no operator has seen the tensor's storage.
  std::optional<int> known_number_of(const at::Tensor& tensor) const;
  int number_of(const at::Tensor& tensor);
  int add(const at::Tensor& tensor, int producer);  // producer -1: no operator of the tape
  /// The forward pass is over: no tensor of the program is asked about any more.
  void forget_numbers() { numbers_.clear(); }

  // Owners.
  bool should_hold(int storage) const;
  bool goes_away(int storage) const;
  bool has_value(plan::Value value) const;
  void settle(int storage);
  /// Makes the tape hold the storage until the schedule, or the region's backward pass, needs the storage no more.
  void claim(int storage) {
    at(storage).claimed = true;
    settle(storage);
  }
  /// Null: the storage is not in memory.
  c10::Storage find(int storage);
  c10::Storage bring(int storage);
  void replace(int storage, const c10::Storage& memory);
  void watch(int storage, c10::StorageImpl& impl);
  void trust(const at::Tensor& tensor);
  static void poison(const c10::Storage& memory);
  void drop_everything(std::shared_ptr<OffloadStore> store) {
    drops_everything_ = true;
    store_ = std::move(store);
  }
  /// Whether everything is dropped but for storages that cannot be rebuilt.
  bool holds_only_what_is_lost() const { return drops_everything_ && store_ == nullptr; }

  // Streams of a device, and storages that are streamed to the store.
  void note_streams(const TapeOperator& record, int named);
  void finish_streams_before(int op);
  void finish_streams_and_fetch();

  // Regions.
  void keep_outside(const at::Tensor& tensor, const std::shared_ptr<SavedTensorPolicy>& policy);
  void copy_before_write(const at::Tensor& tensor);
  void treat_result(int storage, Keep treatment);

 private:
  struct Watch;

  static const c10::DataPtr& allocated(const c10::DataPtr& memory);
  static bool is_from_allocator(const c10::DataPtr& memory);
  static bool is_lent(const at::Tensor& tensor);
  void dropped(int storage, c10::DataPtr data);
  bool is_kept(int storage) const;
  void note_place(int storage, const c10::Storage& memory);
  c10::Storage load(int storage);
  void put_away(int storage);
  std::unique_ptr<StoredAway> send(int storage, const c10::Storage& memory, bool waits);
  void wait_for_oldest_stream();
  void wait_for_stream(int storage);

  void begin_streams(int storage, const c10::Storage& memory);
  void add_stream(int storage, const c10::Storage& memory, const c10::Stream& stream);
  void meet_stream(int storage, const c10::Storage& memory);
  c10::Stream gather_streams(int storage);

  void pack_outside(int storage, const at::Tensor& tensor);
  c10::Storage from_outside(int storage);

  const std::shared_ptr<TapeState> state_;
  std::shared_ptr<OffloadStore> store_;  // outlives the stored copies
  std::vector<TapeStorage> storages_;
  ska::flat_hash_map<const c10::StorageImpl*, int> numbers_;  // in the forward pass
  std::deque<int> leaving_;  // streamed storages that are being written, the oldest first
  bool has_unpacked_ = false;
  bool drops_everything_ = false;
};

}  // namespace snug::detail
