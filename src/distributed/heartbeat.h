#pragma once
// Heartbeat: finds the rank that caused a failed operation. Gloo reports only a broken connection, and a timeout names
// no rank. So a thread of each rank counts up a number in the store, twice a second. Two signs name a rank:
// - The number of a rank stands still. The rank is gone, or the rank's process is stopped.
// - A rank has begun fewer operations than the asking rank. The rank hangs before the next operation, or has left an
//   operation out.

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace snug::detail {

class Heartbeat final {
 public:
  /// `serves_store`: the store ends with this process.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool serves_store);
  /// Tells the other ranks that this rank leaves. The rank that serves the store waits until the other ranks have left,
  /// for at most two seconds.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// Notes that this rank begins an operation.
  void begin_operation();

  /// Lists of ranks such as "2" or "2, 5"; empty: no rank.
  struct Missing {
    std::string lost;    ///< gone or stopped, as found out by this rank or earlier by another rank
    std::string behind;  ///< alive, with fewer operations begun than this rank
  };
  /// Call missing_ranks() when an operation of `size` consecutive ranks has failed, of which this rank is number
  /// `number`, from 0: only these ranks may be behind. The call lasts for several beats.
  Missing missing_ranks(int number, int size);

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace snug::detail
