#pragma once
// OperatorClock: the time that work takes on a device. A CPU is done when an operator returns. Other devices only queue
// it, so that their time is between two events in the queue. Where the device waits for the host, it is the host's.

#include <cstddef>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace snug::detail {

/// Whether the host sets the pace, given the time that operators took on the device and that the host took to call
/// them: the device has done its work in less than half of it. A plan that saves work of the device saves no time then.
bool is_bound_by_host(double device_seconds, double host_seconds);

/// The host's clock for marks of a device other than the CPU, in seconds: a steady clock, or for tests of a device
/// whose time is virtual another one. Returns the one before.
using HostClock = double (*)();
HostClock set_host_clock(HostClock clock);

class OperatorClock {
 public:
  /// A point in the work that was given to the device so far.
  using Mark = size_t;

  /// `device` has an index, unless it is the CPU.
  explicit OperatorClock(c10::Device device) : device_(device) {}

  /// On the current stream of the device. The host does not wait.
  Mark mark();
  using Span = std::pair<Mark, Mark>;
  /// Waits until the device has reached every mark. Returns the seconds of each span: all those of the host, if the
  /// step is bound by it. A span from one stream to another that is behind takes none.
  std::vector<double> finish(const std::vector<Span>& spans);

 private:
  c10::Device device_;
  std::vector<double> host_;        // seconds
  std::vector<c10::Event> events_;  // of another device than the CPU
};

}  // namespace snug::detail
