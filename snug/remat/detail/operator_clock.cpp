#include "snug/remat/detail/operator_clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace snug::detail {

OperatorClock::Mark OperatorClock::mark() {
  if (device_.is_cpu()) {
    times_.push_back(std::chrono::steady_clock::now());
    return times_.size() - 1;
  }
  c10::Event& event = events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // which keeps the time
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return events_.size() - 1;
}

void OperatorClock::finish() {
  for (const c10::Event& event : events_) {
    event.synchronize();
  }
}

double OperatorClock::seconds(Mark from, Mark to) const {
  constexpr double kMillisecond = 1e-3;
  return device_.is_cpu() ? std::chrono::duration<double>(times_[to] - times_[from]).count()
                          : events_[from].elapsedTime(events_[to]) * kMillisecond;
}

}  // namespace snug::detail
