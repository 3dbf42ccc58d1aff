#pragma once
// OperatorClock: the time that work takes on a device. A CPU is done when an operator returns. Processor time counts,
// so time in which other processes have the processor does not: if the calling thread only computes, the thread's own
// time; if the thread waits while other threads of the process compute, as in a parallel loop, the longer of the
// thread's own time and the others', and at most the time of the wall. If the thread waits for anything else, as for a
// file, the time of the wall counts. Other devices only queue the work, so the time is measured between two events in
// the queue. If the device waits for the host, the host's time counts.

#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace snug::detail {

/// Whether the host sets the pace: the device has done the work in less than half of the time that the host took to
/// call the operators. `device_seconds`: time of the operators on the device. `host_seconds`: time of the host's calls.
/// If the host sets the pace, a plan that saves work of the device saves no time.
bool is_bound_by_host(double device_seconds, double host_seconds);

/// Sets the host's clock for marks of devices other than the CPU, in seconds: a steady clock, or another clock for
/// tests of a device whose time is virtual. Returns the clock before.
using HostClock = double (*)();
HostClock set_host_clock(HostClock clock);

class OperatorClock {
 public:
  /// A point in the work given to the device so far.
  using Mark = size_t;

  /// `device` has an index, unless the device is the CPU.
  explicit OperatorClock(c10::Device device) : device_(device) {}

  /// Sets a mark on the current stream of the device. The host does not wait.
  Mark mark();
  using Span = std::pair<Mark, Mark>;
  /// Waits until the device has reached every mark. Returns the seconds of each span: the host's seconds for all spans,
  /// if the host sets the pace. A span from one stream to another stream that is behind takes no time.
  std::vector<double> finish(const std::vector<Span>& spans);
  /// After finish(): the host's seconds of each span; empty, if the host did not set the pace.
  std::vector<double> of_host(const std::vector<Span>& spans) const;

 private:
  double host_seconds(const Span& span) const;

  c10::Device device_;
  bool is_bound_by_host_ = false;
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
