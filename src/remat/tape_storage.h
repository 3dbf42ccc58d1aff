#pragma once
// TapeStorage: one storage that the operators of an OpTape have seen.

#include <algorithm>
#include <cstdint>

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "src/memory/held.h"
#include "src/remat/holding.h"

namespace snug::detail {

struct TapeStorage {
  // As recorded.
  enum class Origin : uint8_t {
    Operator,  // one of the tape's made it
    Program,   // none did
    Lent,      // likewise, and its owner may fill it anew or take it back
  };
  Origin origin = Origin::Program;
  bool is_counted = true;              // its memory is the allocator's
  c10::SmallVector<int, 1> producers;  // per version: the operator; -1: not on the tape
  int64_t bytes = 0;
  c10::SmallVector<WriteCount, 1> counts = {};    // of the tensors it was seen in, one for each counter
  c10::SmallVector<c10::Stream, 1> streams = {};  // of its device that use its memory; the first has made it

  // Whether its last version can be made again.
  bool is_pinned = false;      // never, whatever the operators say
  bool is_rebuildable = true;  // by operators that are on the tape

  // Who needs it.
  int slots = 0;                 // tensors on it that autograd has saved and not released
  int uses = 0;                  // of those, how many backward has asked for
  bool claimed = false;          // the schedule wants it to stay
  bool is_asked_inside = false;  // by a backward pass inside the forward pass or inside another

  // In whose hands it is.
  Holding holding;
  bool is_leaving = false;   // a stream on its way out: the tape has it, too
  bool is_watched = false;   // its memory comes back to the tape by itself; with a listener, or to be put away
  bool was_dropped = false;  // by the program, if it is watched

  bool is_external() const { return origin != Origin::Operator; }
  bool is_lent() const { return origin == Origin::Lent; }
  int last_version() const { return static_cast<int>(producers.size()) - 1; }
  bool was_written_unseen() const {
    return std::any_of(counts.begin(), counts.end(), [](const WriteCount& count) { return count.moved(); });
  }
  // The program resized it: a table that is made anew in each step, a shard that was gathered for one operator.
  bool was_given_back() const {
    const c10::Storage memory = holding.find();
    return memory && static_cast<int64_t>(memory.nbytes()) < bytes;
  }
  int64_t counted_bytes() const { return is_counted ? bytes : 0; }
};

}  // namespace snug::detail
