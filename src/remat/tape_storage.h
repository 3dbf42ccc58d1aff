#pragma once
// TapeStorage: the record of one storage that the operators of an OpTape have seen.

#include <algorithm>
#include <cstdint>
#include <memory>

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "src/memory/held.h"
#include "src/remat/holding.h"
#include "src/remat/tape_region.h"

namespace snug::detail {

struct TapeStorage {
  // Recorded facts.
  enum class Origin : uint8_t {
    Operator,  // made by an operator of the tape
    Program,   // made by no operator of the tape
    Lent,      // made by no operator of the tape; the owner may fill the memory again or take the memory back
  };
  Origin origin = Origin::Program;
  bool is_counted = true;              // whether the memory comes from an allocator, on the device whose bytes count
  c10::SmallVector<int, 1> producers;  // per version: the operator; -1: not on the tape
  int64_t bytes = 0;
  c10::SmallVector<WriteCount, 1> counts = {};    // write counts of the tensors seen on the storage, one per counter
  c10::SmallVector<c10::Stream, 1> streams = {};  // device streams using the memory; the first made the contents

  // Whether the last version can be made again.
  bool is_pinned = false;      // never rebuilt, whatever the operators allow
  bool is_rebuildable = true;  // operators on the tape can make the last version again

  // Users of the storage.
  int slots = 0;                 // tensors on the storage that autograd has saved and not released
  int uses = 0;                  // the number of slots that backward has asked for
  bool claimed = false;          // the tape must hold the storage, as the schedule wants, or until backward has asked
  bool is_asked_inside = false;  // asked for by a backward pass inside the forward pass or inside another backward pass

  // In a region only (op_tape_region.cpp).
  bool is_blank = false;      // made by an operator that reads no values, and not used since: a program may fill it
  bool is_drawn = false;      // random, or computed from random values
  bool is_read = false;       // an operator that may run again has read the last version
  bool is_source = false;     // held, because other values are made from the storage
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

}  // namespace snug::detail
