#pragma once
// Heartbeat: finds out which rank is to blame for a failed operation. Gloo knows only that a connection broke, and a
// timeout knows nothing. So a thread of each rank counts up a number in the store, twice a second. A rank whose number
// stands still is gone, or its process is stopped. A rank that has begun fewer operations than this one hangs before
// the next, or has left one out.

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace snug::detail {

class Heartbeat final {
 public:
  /// `serves_store`: the store ends with this process.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool serves_store);
  /// Tells the others that this rank leaves. The rank that serves the store waits until the others have left, for at
  /// most two seconds.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// This rank begins an operation.
  void begin_operation();

  /// Ranks such as "2" or "2, 5"; empty: none.
  struct Missing {
    std::string lost;    ///< gone or stopped, as this rank has found out or another before it
    std::string behind;  ///< alive, with fewer operations begun than this rank
  };
  /// Call it when an operation has failed; it takes some beats of time.
  Missing missing_ranks();

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace snug::detail
