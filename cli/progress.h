#pragma once
// Shows a training run while it goes: a bar on a terminal, plain lines otherwise.

#include <chrono>
#include <cstdint>
#include <string>

#include "snug/report/run_log.h"

namespace snug::cli {

class Progress {
 public:
  explicit Progress(int64_t total_steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepRecord& record);
  /// A line of its own, above the bar.
  void note(const std::string& text);

 private:
  std::string bar(const StepRecord& record) const;
  std::string time_left(int64_t step) const;

  int64_t total_;
  int64_t first_step_ = -1;
  bool is_terminal_;
  bool bar_is_shown_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double validation_loss_ = 0;
  bool has_validation_ = false;
};

}  // namespace snug::cli
