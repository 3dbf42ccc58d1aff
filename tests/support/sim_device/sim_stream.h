#pragma once
// The streams of the simulated accelerator: queues of tasks, each with a virtual clock.

#include <cstdint>
#include <functional>
#include <mutex>

#include <c10/core/Stream.h>

namespace snug::sim_device {

/// A place in a stream's queue, and the virtual time at which the stream will be there.
struct Mark {
  c10::Stream stream;
  int64_t position = 0;
  double seconds = 0;
};

/// Guards all that the devices have. Tasks run under it.
std::recursive_mutex& device_mutex();

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);

c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream pool_stream(c10::DeviceIndex index);  ///< Another one at each call, until all have been given.
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);  ///< Returns the one that was current on its device.

/// Puts a task at the end of the stream, or runs it at once if streams are not lazy. It may hold raw pointers only.
void enqueue(c10::Stream stream, double seconds, std::function<void()> task);

/// The place behind all that is in the queue now.
Mark end_of(c10::Stream stream);

/// What comes after it in the stream waits for the mark.
void block(c10::Stream stream, const Mark& mark);

/// Whether the tasks before the mark have run.
bool has_passed(const Mark& mark);
/// Whether the host can know: the host has waited or worked until the mark's virtual time.
bool is_over(const Mark& mark);

/// The host waits.
void run_until(const Mark& mark);
void run_all(c10::DeviceIndex index);  ///< The default stream first.

bool is_lazy();

}  // namespace snug::sim_device
