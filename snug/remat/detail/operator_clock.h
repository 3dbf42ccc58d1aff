#pragma once
// OperatorClock: the time that work takes on a device. A CPU is done when an operator returns. Other devices only queue
// it, so that their time is between two events in the queue.

#include <chrono>
#include <cstddef>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace snug::detail {

class OperatorClock {
 public:
  /// A point in the work that was given to the device so far.
  using Mark = size_t;

  /// `device` has an index, unless it is the CPU.
  explicit OperatorClock(c10::Device device) : device_(device) {}

  /// On the current stream of the device. The host does not wait.
  Mark mark();
  /// Waits until the device has reached every mark.
  void finish();
  /// The seconds from one mark to a later one. After finish().
  double seconds(Mark from, Mark to) const;

 private:
  c10::Device device_;
  std::vector<std::chrono::steady_clock::time_point> times_;  // of a CPU
  std::vector<c10::Event> events_;                            // of another device
};

}  // namespace snug::detail
