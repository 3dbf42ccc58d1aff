#include "src/remat/operator_clock.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <numeric>

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

double sum(const std::vector<double>& seconds) { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }

}  // namespace

bool is_bound_by_host(double device_seconds, double host_seconds) { return 2 * device_seconds < host_seconds; }

HostClock set_host_clock(HostClock clock) { return host_clock.exchange(clock); }

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
  std::vector<double> on_host, on_device;
  for (const Span& span : spans) {
    on_host.push_back(host_seconds(span));
    on_device.push_back(events_.empty()
                            ? on_host.back()
                            : std::max(0.0, events_[span.first].elapsedTime(events_[span.second]) * kMillisecond));
  }
  is_bound_by_host_ = events_.empty() || is_bound_by_host(sum(on_device), sum(on_host));
  return is_bound_by_host_ ? on_host : on_device;
}

std::vector<double> OperatorClock::of_host(const std::vector<Span>& spans) const {
  std::vector<double> seconds;
  for (size_t i = 0; is_bound_by_host_ && i < spans.size(); ++i) {
    seconds.push_back(host_seconds(spans[i]));
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
