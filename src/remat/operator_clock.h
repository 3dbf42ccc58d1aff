#pragma once
// OperatorClock: the time that work takes on a device. A CPU is done when an operator returns. Processor time counts,
// so time in which other processes have the processor does not: if the calling thread only computes, the thread's own
// time; if the thread waits while other threads of the process compute, as in a parallel loop, the longer of the
// thread's own time and the others', and at most the time of the wall. If the thread waits for anything else, as for a
// file, the time of the wall counts. Other devices only queue the work, so the time is measured between two events in
// the queue. A device that waits for the host reaches an event when the host sets the event, so the device is kept
// busy: a device without work sleeps before the next span, and the work of the span is behind the sleep. A queue has
// room for about a thousand kernels, and a call waits for room, so the host does not get further ahead than kMostAhead
// marks.
//
// The host's time is the program's alone: the work of the tape and of the recording has accounts of its own.

#include <array>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace snug::detail {

/// Sets the host's clock for marks of devices other than the CPU, in seconds: a steady clock, or another clock for
/// tests of a device whose time is virtual. Returns the clock before.
using HostClock = double (*)();
HostClock set_host_clock(HostClock clock);

/// Sets what puts a sleep of about a millisecond into the current stream of a device other than the CPU; null: no
/// sleep. Returns the function before.
using DeviceSleep = void (*)(c10::Device device);
DeviceSleep set_device_sleep(DeviceSleep sleep);

class OperatorClock {
 public:
  /// A point in the work given to the device so far.
  using Mark = size_t;

  /// `device` has an index, unless the device is the CPU.
  explicit OperatorClock(c10::Device device);

  /// For whom the thread works.
  enum class Worker { Program, Tape, Recorder };
  /// From now on the time is that of another worker. Returns the worker until now.
  Worker switch_to(Worker next);
  /// The seconds of the tape so far.
  double of_tape() const { return worked_[static_cast<size_t>(Worker::Tape)]; }

  /// Sets a mark on the current stream of the device. The host does not wait.
  Mark mark();
  /// Sets the mark at the beginning of a span. A device without work gets a sleep before the mark.
  Mark begin();
  using Span = std::pair<Mark, Mark>;
  /// Waits until the device has reached every mark. Returns the device's seconds of each span. A span from one stream
  /// to another stream that is behind takes no time.
  std::vector<double> finish(const std::vector<Span>& spans);
  /// The host's seconds of each span.
  std::vector<double> of_host(const std::vector<Span>& spans) const;

 private:
  static constexpr size_t kMostAhead = 128;

  double look() const;
  double host_seconds(const Span& span) const;

  c10::Device device_;
  Worker worker_ = Worker::Program;
  double since_;
  std::array<double, 3> worked_ = {};  // seconds of each worker
  struct Thread {
    std::thread::id id;
    long waits;         // how often the thread has given the processor up by itself
    double seconds;     // of the processor, that the thread has had
    double of_process;  // the same of all threads
    double of_others;   // that tape and recorder have worked
  };

  std::vector<double> host_;        // seconds that the program has worked
  std::vector<Thread> threads_;     // on a CPU: the thread at each mark
  std::vector<c10::Event> events_;  // of devices other than the CPU
};

}  // namespace snug::detail
