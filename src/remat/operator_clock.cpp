#include "src/remat/operator_clock.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>

namespace snug::detail {
namespace {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double processor_seconds(clockid_t clock) {
  timespec time = {};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::atomic<HostClock> host_clock = &steady_seconds;
std::atomic<DeviceSleep> device_sleep = nullptr;

}  // namespace

bool is_bound_by_host(double device_seconds, double step_seconds) { return 2 * device_seconds < step_seconds; }

HostClock set_host_clock(HostClock clock) { return host_clock.exchange(clock); }

void set_device_sleep(DeviceSleep sleep) { device_sleep = sleep; }

OperatorClock::Mark OperatorClock::begin() {
  const DeviceSleep sleep = device_sleep;
  if (!device_.is_cpu() && sleep != nullptr && (events_.empty() || events_.back().query())) {
    const c10::DeviceGuard guard(device_);
    sleep();
  }
  return mark();
}

OperatorClock::Mark OperatorClock::mark() {
  if (device_.is_cpu()) {
    host_.push_back(steady_seconds());
    rusage usage = {};
    ::getrusage(RUSAGE_THREAD, &usage);
    threads_.push_back({std::this_thread::get_id(), usage.ru_nvcsw, processor_seconds(CLOCK_THREAD_CPUTIME_ID),
                        processor_seconds(CLOCK_PROCESS_CPUTIME_ID)});
    return host_.size() - 1;
  }
  host_.push_back(host_clock.load()());
  c10::Event& event = events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // keeps the time
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return host_.size() - 1;
}

std::vector<double> OperatorClock::finish(const std::vector<Span>& spans) {
  constexpr double kMillisecond = 1e-3;
  for (const c10::Event& event : events_) {
    event.synchronize();
  }
  std::vector<double> seconds;
  for (const Span& span : spans) {
    seconds.push_back(device_.is_cpu()
                          ? host_seconds(span)
                          : std::max(0.0, events_[span.first].elapsedTime(events_[span.second]) * kMillisecond));
  }
  return seconds;
}

double OperatorClock::host_seconds(const Span& span) const {
  constexpr double kHelp = 1. / 16;  // of the thread's own work: less than that helps nobody
  const auto [from, to] = span;
  const double wall = host_[to] - host_[from];
  if (threads_.empty() || threads_[from].id != threads_[to].id) {
    return wall;
  }
  const double own = threads_[to].seconds - threads_[from].seconds;
  const double others = threads_[to].of_process - threads_[from].of_process - own;
  const bool only_computes = threads_[from].waits == threads_[to].waits;
  const bool is_helped = others > kHelp * own;
  return only_computes ? own : is_helped ? std::min(wall, std::max(own, others)) : wall;
}

}  // namespace snug::detail
