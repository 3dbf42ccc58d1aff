#pragma once
// Shows a training run in progress: on a terminal, one line that is overwritten; otherwise, lines from time to time.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "program/report/run_log.h"

namespace snug::cli {

/// The output for progress, and a clock.
struct Screen {
  std::function<void(std::string_view)> show;
  std::function<int()> columns;     ///< the terminal's current width; 0: the output is not a terminal
  std::function<double()> seconds;  ///< since any fixed moment
};

/// Standard output. A terminal of unknown width has 80 columns.
Screen standard_output();

class Progress {
 public:
  /// `item`: the noun for StepRecord::items, in the plural.
  Progress(int64_t total_steps, std::string item, Screen screen = standard_output());
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// On a terminal, writes a line no longer than the terminal's width, and leaves out less important parts. The line of
  /// the last step stays. Otherwise, writes a line for the first step and the last step, for one step in each fiftieth
  /// of the run, and whenever ten seconds have passed since the last line.
  void step(const StepRecord& record);
  /// Writes a separate line above the progress line.
  void note(const std::string& text);

 private:
  std::string line(const StepRecord& record, int columns) const;
  std::string time_left(int64_t step) const;

  int64_t total_;
  std::string item_;
  Screen screen_;
  int64_t first_step_ = -1;
  double start_ = 0;
  double shown_at_ = 0;
  bool is_line_open_ = false;
  std::optional<double> validation_loss_;
};

}  // namespace snug::cli
