#pragma once
// SpikeWatch: whether a step's loss or gradient norm is out of line with the steps before it.

#include <deque>
#include <string>

namespace snug::detail {

class SpikeWatch {
 public:
  static constexpr size_t kWindow = 64;  ///< steps with which one is compared
  static constexpr size_t kLeast = 16;   ///< before there are so many, only what is not finite is out of line

  /// The reason, if the step is out of line: a number is not finite; or the loss is more than 6 deviations above the
  /// median of the window; or the norm is more than 10 times the largest of the window. Empty otherwise; then the step
  /// is a part of the window from now on. A deviation is the distance of the quartiles divided by 1.349, as for a
  /// normal distribution, which the fall of the loss at the beginning of a run moves less than the standard deviation,
  /// and at least a hundredth of the median.
  std::string judge(double loss, double grad_norm);

  /// The window, oldest first, as pairs of numbers: for snapshots. restore() throws ConfigError for what numbers() does
  /// not give.
  std::string numbers() const;
  void restore(const std::string& numbers);

 private:
  struct Step {
    double loss, grad_norm;
  };
  std::deque<Step> window_;
};

}  // namespace snug::detail
