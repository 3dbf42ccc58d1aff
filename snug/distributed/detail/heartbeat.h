#pragma once
// Heartbeat: so that an operation which failed can say whose fault it was. Gloo knows that a connection broke, and a timeout knows nothing. So
// each rank counts up a number in the store, twice a second; whose number stands still is gone, or hangs.

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace snug::detail {

class Heartbeat final {
 public:
  /// `serves_store`: the store goes with this process.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool serves_store);
  /// Tells the others that this rank leaves. The rank that serves the store stays until the others have left, but two seconds at most.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// To be asked when an operation has failed; takes some beats of time. The ranks that were found to be gone, by this rank or another
  /// before it: "2" or "2, 5"; empty: none.
  std::string lost_ranks();

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace snug::detail
