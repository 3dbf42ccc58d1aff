#pragma once
// StepWatch: time and memory of one step, from the constructor on.

#include <chrono>
#include <cstdint>

#include "snug/memory.h"
#include "snug/step_plan.h"
#include "src/memory/peak_watch.h"

namespace snug::detail {

class StepWatch {
 public:
  explicit StepWatch(c10::Device device) : level_(live_bytes(device).count()), peak_(device) {}

  /// The rise of memory so far.
  int64_t rise() const { return peak_.peak() - level_; }
  void finish(StepResult& result) const {
    result.peak_bytes = peak_.peak();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int64_t level_;  // bytes alive before the step
  PeakWatch peak_;
};

}  // namespace snug::detail
