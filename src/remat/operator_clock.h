#pragma once
// OperatorClock: the time that work takes on a device. A CPU is done when an operator returns. Processor time counts,
// so time in which other processes have the processor does not: if the calling thread only computes, the thread's own
// time; if the thread waits while other threads of the process compute, as in a parallel loop, the longer of the
// thread's own time and the others', and at most the time of the wall. If the thread waits for anything else, as for a
// file, the time of the wall counts. Other devices only queue the work, so the time is measured between two events in
// the queue. Between two events of an idle device, the time of the host's call would count too. So an idle device gets
// other work first, and the operator queues up behind.

#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace snug::detail {

/// Whether the host sets the pace: the device works in less than half of the time of the step. `device_seconds`: time
/// of the operators on the device. `step_seconds`: time of the step without any recording. If the host sets the pace, a
/// plan that saves work of the device saves no time.
bool is_bound_by_host(double device_seconds, double step_seconds);

/// Sets the host's clock for marks of devices other than the CPU, in seconds: a steady clock, or another clock for
/// tests of a device whose time is virtual. Returns the clock before.
using HostClock = double (*)();
HostClock set_host_clock(HostClock clock);

/// Sets the function that gives the current stream of the current device some milliseconds of work without memory.
/// Null, as for devices without such work: spans that find the device idle last as long as the host's call.
using DeviceSleep = void (*)();
void set_device_sleep(DeviceSleep sleep);

class OperatorClock {
 public:
  /// A point in the work given to the device so far.
  using Mark = size_t;

  /// `device` has an index, unless the device is the CPU.
  explicit OperatorClock(c10::Device device) : device_(device) {}

  /// Sets a mark on the current stream of the device. The host does not wait.
  Mark mark();
  /// The same, at the beginning of a span of operators: an idle device gets other work before the mark.
  Mark begin();
  using Span = std::pair<Mark, Mark>;
  /// Waits until the device has reached every mark. Returns the seconds of each span. A span from one stream to another
  /// stream that is behind takes no time.
  std::vector<double> finish(const std::vector<Span>& spans);
  /// The host's seconds of a span.
  double host_seconds(const Span& span) const;

 private:
  c10::Device device_;
  struct Thread {
    std::thread::id id;
    long waits;         // how often the thread has given the processor up by itself
    double seconds;     // of the processor, that the thread has had
    double of_process;  // the same of all threads
  };

  std::vector<double> host_;        // seconds
  std::vector<Thread> threads_;     // on a CPU: the thread at each mark
  std::vector<c10::Event> events_;  // of devices other than the CPU
};

}  // namespace snug::detail
