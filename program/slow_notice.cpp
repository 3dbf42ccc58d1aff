#include "program/slow_notice.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <stop_token>
#include <utility>

#include <unistd.h>

namespace snug::cli {
namespace {

constexpr std::chrono::seconds kPatience(2);

void say_unless_stopped(const std::stop_token& stop, const std::string& text) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock lock(mutex);
  never.wait_for(lock, stop, kPatience, [] { return false; });
  if (!stop.stop_requested()) {
    std::fputs((text + "\n").c_str(), stderr);  // a terminal that is already closed is not an error
  }
}

}  // namespace

SlowNotice::SlowNotice(std::string text) {
  if (isatty(STDERR_FILENO) != 0) {
    thread_ = std::jthread([text = std::move(text)](const std::stop_token& stop) { say_unless_stopped(stop, text); });
  }
}

}  // namespace snug::cli
