#include "program/signals.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace snug::cli {
namespace {

constexpr int64_t kOneRequest = 100'000'000;  // nanoseconds
static_assert(std::atomic<int64_t>::is_always_lock_free, "a signal's handler takes no locks");

std::atomic<int> newest = 0;
std::atomic<int> times = 0;
std::atomic<bool> second_ends = false;
std::atomic<int64_t> counted_at = 0;  // 0: no request yet

std::array<struct sigaction, NSIG> as_started = {};  // of the ignored signals; other signals have the default action

int64_t now() {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Any thread may take a signal, and two threads may take one signal each.
extern "C" void on_stop(int signal) {
  int64_t before = counted_at;
  const int64_t at = now();
  const bool is_another = before == 0 || (signal != SIGHUP && at - before >= kOneRequest);
  if (!is_another || !counted_at.compare_exchange_strong(before, at)) {
    return;
  }
  newest = signal;
  if (++times == 2 && second_ends) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);  // as soon as this function returns
  }
}

}  // namespace

void catch_stops(SecondStop second) {
  second_ends = second == SecondStop::EndsTheProgram;
  struct sigaction action = {};
  action.sa_handler = on_stop;
  action.sa_flags = SA_RESTART;  // a write goes on; poll() does not
  ::sigfillset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before = {};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) {
      ::sigaction(signal, &action, nullptr);
    }
  }
}

int last_stop() { return newest; }
int stops() { return times; }

void ignore_signal(int signal) {
  struct sigaction action = {};
  action.sa_handler = SIG_IGN;
  ::sigaction(signal, &action, &as_started.at(static_cast<size_t>(signal)));
}

void restore_ignored_signals() {
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    ::sigaction(signal, &as_started.at(static_cast<size_t>(signal)), nullptr);
  }
}

}  // namespace snug::cli
