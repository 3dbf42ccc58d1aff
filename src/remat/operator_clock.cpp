#include "src/remat/operator_clock.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <utility>

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

HostClock set_host_clock(HostClock clock) { return host_clock.exchange(clock); }

DeviceSleep set_device_sleep(DeviceSleep sleep) { return device_sleep.exchange(sleep); }

OperatorClock::OperatorClock(c10::Device device) : device_(device), since_(look()) {}

double OperatorClock::look() const { return device_.is_cpu() ? steady_seconds() : host_clock.load()(); }

// Tape and recorder work for microseconds at a time. In a longer time another process has had the processor.
OperatorClock::Worker OperatorClock::switch_to(Worker next) {
  constexpr double kLongest = 1e-4;
  const double now = look(), worked = now - std::exchange(since_, now);
  worked_[static_cast<size_t>(worker_)] += worker_ == Worker::Program ? worked : std::min(worked, kLongest);
  return std::exchange(worker_, next);
}

OperatorClock::Mark OperatorClock::mark() {
  const Worker worker = switch_to(Worker::Recorder);
  const auto& [of_program, of_tape, of_recorder] = worked_;
  host_.push_back(of_program);
  if (device_.is_cpu()) {
    rusage usage = {};
    ::getrusage(RUSAGE_THREAD, &usage);
    threads_.push_back({std::this_thread::get_id(), usage.ru_nvcsw, processor_seconds(CLOCK_THREAD_CPUTIME_ID),
                        processor_seconds(CLOCK_PROCESS_CPUTIME_ID), of_tape + of_recorder});
  } else {
    c10::Event& event = events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // keeps the time
    event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    if (events_.size() > kMostAhead) {
      events_[events_.size() - 1 - kMostAhead].synchronize();
    }
  }
  switch_to(worker);
  return host_.size() - 1;
}

OperatorClock::Mark OperatorClock::begin() {
  const DeviceSleep sleep = device_sleep.load();
  if (sleep != nullptr && !device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    if (guard.queryStream(guard.getStream(device_))) {
      sleep(device_);
    }
  }
  return mark();
}

std::vector<double> OperatorClock::finish(const std::vector<Span>& spans) {
  constexpr double kMillisecond = 1e-3;
  if (events_.empty()) {
    return of_host(spans);
  }
  for (const c10::Event& event : events_) {
    event.synchronize();
  }
  std::vector<double> seconds;
  for (const auto& [from, to] : spans) {
    seconds.push_back(std::max(0.0, events_[from].elapsedTime(events_[to]) * kMillisecond));
  }
  return seconds;
}

std::vector<double> OperatorClock::of_host(const std::vector<Span>& spans) const {
  std::vector<double> seconds;
  for (const Span& span : spans) {
    seconds.push_back(host_seconds(span));
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
  const double of_thread = threads_[to].seconds - threads_[from].seconds;
  const double own = std::max(0.0, of_thread - (threads_[to].of_others - threads_[from].of_others));
  const double others = threads_[to].of_process - threads_[from].of_process - of_thread;
  const bool only_computes = threads_[from].waits == threads_[to].waits;
  const bool is_helped = others > kHelp * own;
  return only_computes ? own : is_helped ? std::min(wall, std::max(own, others)) : wall;
}

}  // namespace snug::detail
