#pragma once
// TapeStorages: the storages that the operators of an OpTape have seen, and their owners. tape_storages.cpp says how a
// storage changes owners, tape_streams.cpp how streams of a device meet, and tape_region.cpp what a region keeps.

#include <algorithm>
#include <any>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>
#include <c10/util/flat_hash_map.h>

#include "snug/checkpoint.h"
#include "src/activations/offload_store.h"
#include "src/memory/held.h"
#include "src/planner/profile.h"
#include "src/remat/holding.h"
#include "src/remat/tape_state.h"

namespace snug::detail {

/// Memory from outside of a region, as kept by a policy outside.
struct KeptOutside {
  std::shared_ptr<SavedTensorPolicy> policy;
  at::Tensor shape;  // of the packed tensor; has no memory
  std::any packed;
  bool is_asked_always = false;  // in backward, also if the program still has the memory
};

struct TapeStorage {
  explicit TapeStorage(const c10::Storage& memory) : bytes(static_cast<int64_t>(memory.nbytes())), holding(memory) {}

  // Recorded facts.
  enum class Origin : uint8_t {
    Operator,  // made by an operator of the tape
    Program,   // made by no operator of the tape
    Lent,      // made by no operator of the tape; the owner may fill the memory again or take the memory back
  };
  Origin origin = Origin::Program;
  bool is_counted = true;              // whether the memory comes from an allocator, on the device whose bytes count
  c10::SmallVector<int, 2> producers;  // per version: the operator; -1: not on the tape
  int64_t bytes;
  c10::SmallVector<WriteCount, 2> counts = {};    // write counts of the tensors seen on the storage, one per counter
  c10::SmallVector<c10::Stream, 1> streams = {};  // device streams using the memory; the first made the contents

  // Whether the last version can be made again.
  bool is_pinned = false;      // never rebuilt, whatever the operators allow
  bool is_rebuildable = true;  // operators on the tape can make the last version again

  // Users of the storage.
  int slots = 0;                 // tensors on the storage that autograd has saved and not released
  int uses = 0;                  // the number of slots that backward has asked for
  bool claimed = false;          // the tape must hold the storage, as the schedule wants, or until backward has asked
  bool is_evicted = false;       // dropped for lack of memory, although the schedule keeps the storage
  bool is_source = false;        // held, because other values are made from the storage: in a region, or evicted ones
  bool is_asked_inside = false;  // asked for by a backward pass inside the forward pass or inside another backward pass

  // In a region only (tape_region.cpp).
  bool is_blank = false;      // made by an operator that reads no values, and not used since: a program may fill it
  bool is_drawn = false;      // random, or computed from random values
  bool is_read = false;       // an operator that may run again has read the last version
  bool is_offloaded = false;  // put away while nobody needs the storage
  bool is_unneeded = false;   // no saved tensor depends on the storage
  int unasked = 0;            // slots that the backward pass under way has not asked for
  std::shared_ptr<KeptOutside> outside = nullptr;  // memory from outside: kept by a policy outside

  // Owners of the bytes.
  Holding holding;
  bool is_leaving = false;  // being streamed to the store; until the end of the write, the tape holds the storage too
  bool is_watched = false;  // the memory returns to the tape by itself; set with a listener, or to put the storage away
  bool was_dropped = false;  // dropped by the program; only for watched storages

  bool is_external() const { return origin != Origin::Operator; }
  bool is_lent() const { return origin == Origin::Lent; }
  int last_version() const { return static_cast<int>(producers.size()) - 1; }
  bool was_written_unseen() const {
    return std::any_of(counts.begin(), counts.end(), [](const WriteCount& count) { return count.moved(); });
  }
  // Whether the program shrank the storage: a table that is made again in each step, or a shard that was gathered for
  // one operator.
  bool was_given_back() const {
    const c10::Storage memory = holding.find();
    return memory && static_cast<int64_t>(memory.nbytes()) < bytes;
  }
  bool has_changed_unseen() const { return was_written_unseen() || was_given_back(); }
  // The write count of a tensor. On memory made by operators, a counter that is new to the tape has counted nothing.
  WriteCount& count_of(const at::Tensor& tensor) {
    const auto found = std::ranges::find(counts, WriteCount::counter_of(tensor), &WriteCount::counter);
    if (found != counts.end()) {
      return *found;
    }
    return is_external() ? counts.emplace_back(tensor) : counts.emplace_back(tensor, 0);
  }
  int64_t counted_bytes() const { return is_counted ? bytes : 0; }
};

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
  bool is_kept(int storage) const;
  bool goes_away(int storage) const;
  bool has_value(plan::Value value) const;
  void settle(int storage);
  /// Makes the tape hold the storage until the schedule, or the region's backward pass, needs the storage no more;
  /// without schedule and region, until the forward pass is over.
  void claim(int storage) {
    at(storage).claimed = true;
    settle(storage);
  }
  /// Null: the storage is not in memory.
  c10::Storage find(int storage);
  /// Like find(), but also loads the storage from the store.
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
  bool drops_all_that_can_be_rebuilt() const { return drops_everything_ && store_ == nullptr; }

  // Memory for allocations that find no room.
  bool is_evictable(int storage) const;
  bool is_dropped_by_plan(int storage) const;
  void evict(int storage);
  bool has_evicted() const { return has_evicted_; }

  // Streams of a device, and transfers of storages to the store and back.
  void note_stream(int storage, std::optional<c10::Stream> named);
  void finish_transfers_before(int op);
  void finish_transfers_and_fetch();

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
  void note_place(int storage, const c10::Storage& memory);
  c10::Storage load(int storage);
  void put_away(int storage);
  std::unique_ptr<StoredAway> send(int storage, const c10::Storage& memory, bool waits);
  void wait_for_oldest_transfer();
  void wait_for_transfer(int storage);

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
  bool has_evicted_ = false;
};

}  // namespace snug::detail
