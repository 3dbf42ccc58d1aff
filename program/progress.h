#pragma once
// Shows a training run while it goes: one line on a terminal, which is written over, and lines now and then elsewhere.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "program/report/run_log.h"

namespace snug::cli {

/// Where a run is shown, and the clock beside it.
struct Screen {
  std::function<void(std::string_view)> show;
  std::function<int()> columns;     ///< the width of the terminal, as it is now; 0: this is none
  std::function<double()> seconds;  ///< since any moment
};

/// Standard output. A terminal that does not tell its width has 80 columns.
Screen standard_output();

class Progress {
 public:
  /// `item`: what StepRecord::items counts, in the plural.
  Progress(int64_t total_steps, std::string item, Screen screen = standard_output());
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// On a terminal, a line no longer than its width: what is less important is left out. That of the last step stays.
  /// Elsewhere, a line for the first step and the last, for one in each fiftieth of the run, and where ten seconds have
  /// passed since the last line.
  void step(const StepRecord& record);
  /// A line of its own, above the progress line.
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
