#include "tests/support/sim_device/sim_stream.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tests/support/sim_device/sim_device.h"

namespace snug::sim_device {
namespace {

constexpr int kStreams = 9;  // a device's default stream and those of its pool

struct Queue {
  std::deque<std::function<void()>> tasks;
  int64_t begun = 0;   // number of tasks that were taken from the queue
  int64_t passed = 0;  // number of tasks that have run
  double seconds = 0;  // when the last task will be done

  int64_t end() const { return begun + static_cast<int64_t>(tasks.size()); }
};

struct Device {
  std::array<Queue, kStreams> queues;
  int given = 0;  // streams of the pool
};

bool lazy = false, side_streams_are_lazy = true;
double waited_until = 0;  // what the host has waited for, and has worked
double pace = 0;          // seconds of the host for each task

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kDevices> stream_of_thread{};

Device& device_at(c10::DeviceIndex index) {
  static auto* const devices = new std::array<Device, kDevices>;  // outlives all threads
  return devices->at(static_cast<size_t>(index));
}

Queue& queue_of(c10::Stream stream) {
  return device_at(stream.device_index()).queues.at(static_cast<size_t>(stream.id()));
}

c10::Stream stream_at(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

// The state of the thread that happens to wait means nothing to a task.
void run_bare(const std::function<void()>& task) {
  const c10::impl::ExcludeDispatchKeyGuard bare(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                c10::autocast_dispatch_keyset |
                                                c10::DispatchKeySet(c10::DispatchKey::Fake));
  task();
}

void run(Queue& queue, int64_t position) {
  while (queue.begun < position && !queue.tasks.empty()) {
    const auto task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    ++queue.begun;
    run_bare(task);
    ++queue.passed;
  }
}

void append(c10::Stream stream, std::function<void()> task) {
  Queue& queue = queue_of(stream);
  queue.tasks.push_back(std::move(task));
  if (!lazy || (stream.id() != 0 && !side_streams_are_lazy)) {
    run(queue, queue.end());
  }
}

}  // namespace

std::recursive_mutex& device_mutex() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}

c10::Device device(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

c10::DeviceIndex current_device() { return device_of_thread; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) { return std::exchange(device_of_thread, index); }

c10::Stream default_stream(c10::DeviceIndex index) { return stream_at(index, 0); }

c10::Stream pool_stream(c10::DeviceIndex index) {
  const std::lock_guard lock(device_mutex());
  return stream_at(index, 1 + device_at(index).given++ % (kStreams - 1));
}

c10::Stream current_stream(c10::DeviceIndex index) {
  const auto of = index < 0 ? current_device() : index;
  return stream_at(of, stream_of_thread.at(static_cast<size_t>(of)));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto index = stream.device_index();
  return stream_at(index, std::exchange(stream_of_thread.at(static_cast<size_t>(index)), stream.id()));
}

void enqueue(c10::Stream stream, double seconds, std::function<void()> task) {
  const std::lock_guard lock(device_mutex());
  Queue& queue = queue_of(stream);
  waited_until += seconds > 0 ? pace : 0;  // the allocator's tasks are nobody's kernels
  queue.seconds = std::max(queue.seconds, waited_until) + seconds;
  append(stream, std::move(task));
}

Mark end_of(c10::Stream stream) {
  const std::lock_guard lock(device_mutex());
  const Queue& queue = queue_of(stream);
  return {stream, queue.end(), std::max(queue.seconds, waited_until)};
}

void block(c10::Stream stream, const Mark& mark) {
  const std::lock_guard lock(device_mutex());
  Queue& queue = queue_of(stream);
  queue.seconds = std::max(queue.seconds, mark.seconds);
  append(stream, [mark] { run(queue_of(mark.stream), mark.position); });
}

bool has_passed(const Mark& mark) {
  const std::lock_guard lock(device_mutex());
  return queue_of(mark.stream).passed >= mark.position;
}

bool is_over(const Mark& mark) {
  const std::lock_guard lock(device_mutex());
  return has_passed(mark) && mark.seconds <= waited_until;
}

void run_until(const Mark& mark) {
  const std::lock_guard lock(device_mutex());
  waited_until = std::max(waited_until, mark.seconds);
  run(queue_of(mark.stream), mark.position);
}

void run_all(c10::DeviceIndex index) {
  for (c10::StreamId id = 0; id < kStreams; ++id) {
    run_until(end_of(stream_at(index, id)));
  }
}

bool is_lazy() {
  const std::lock_guard lock(device_mutex());
  return lazy;
}

double host_seconds() {
  const std::lock_guard lock(device_mutex());
  return waited_until;
}

double virtual_seconds(c10::Device of) { return end_of(current_stream(of.index())).seconds; }

void sleep(c10::Device of) {
  enqueue(current_stream(of.index()), kSleepSeconds, [] {});
}

HostPace::HostPace(double seconds) {
  const std::lock_guard lock(device_mutex());
  pace = seconds;
}

HostPace::~HostPace() {
  const std::lock_guard lock(device_mutex());
  pace = 0;
}

LazyStreams::LazyStreams(bool side_streams_at_once) {
  const std::lock_guard lock(device_mutex());
  lazy = true;
  side_streams_are_lazy = !side_streams_at_once;
}

LazyStreams::~LazyStreams() {
  const std::lock_guard lock(device_mutex());
  for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
    run_all(index);
  }
  lazy = false;
}

}  // namespace snug::sim_device
