#pragma once
// Heartbeat: finds out which rank is to blame for a failed operation. Gloo knows only that a connection broke, and a
// timeout knows nothing. So each rank counts up a number in the store, twice a second. A rank whose number stands still
// is gone, or hangs.

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

  /// Call it when an operation has failed; it takes some beats of time. Returns the ranks that were found to be gone,
  /// by this rank or by another before it: "2" or "2, 5"; empty: none.
  std::string lost_ranks();

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace snug::detail
