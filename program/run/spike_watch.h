#pragma once
// SpikeWatch: whether a step's loss or gradient norm is out of line with the steps before it.

#include <deque>
#include <string>

namespace snug::detail {

class SpikeWatch {
 public:
  static constexpr size_t kWindow = 64;  ///< the number of steps that a step is compared with
  static constexpr size_t kLeast = 16;   ///< with fewer steps, only a number that is not finite is out of line

  /// The reason, if the step is out of line:
  /// - a number is not finite; or
  /// - the loss is more than 6 deviations above the median of the window; or
  /// - the norm is more than 10 times the largest norm of the window.
  ///
  /// Empty otherwise; then the step is a part of the window from now on. A deviation is the distance of the quartiles
  /// divided by 1.349, as for a normal distribution, and at least a hundredth of the median. The fall of the loss at
  /// the beginning of a run moves the distance of the quartiles less than the standard deviation.
  std::string judge(double loss, double grad_norm);

  /// The window, oldest first, as pairs of numbers: for snapshots. restore() throws ConfigError for any text that
  /// numbers() cannot return.
  std::string numbers() const;
  void restore(const std::string& numbers);

 private:
  struct Step {
    double loss, grad_norm;
  };
  std::deque<Step> window_;
};

}  // namespace snug::detail
