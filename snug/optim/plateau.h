#pragma once
// ReduceOnPlateau: lowers the learning rate when a metric has stopped getting better.
//
//   snug::ReduceOnPlateau plateau(optimizer, {.factor = 0.5, .patience = 3});
//   for (...) {
//     train_one_epoch();
//     plateau.step(validation_loss());
//   }

#include <cstdint>

#include "snug/core/state.h"

namespace torch::optim {
class Optimizer;
}

namespace snug {

struct PlateauOptions {
  enum class Mode { Min, Max };
  enum class Threshold { Relative, Absolute };

  Mode mode = Mode::Min;    ///< what is better: less (a loss) or more (an accuracy)
  double factor = 0.1;      ///< times which the rates go, above 0 and below 1
  int64_t patience = 10;    ///< metrics in a row without progress that are put up with, at least 0
  double threshold = 1e-4;  ///< progress that counts, at least 0: a share of the best metric,
  Threshold threshold_mode = Threshold::Relative;  ///< or in the metric's own unit
  int64_t cooldown = 0;  ///< metrics after a reduction in which nothing is counted, at least 0
  double min_lr = 0;     ///< no group's rate falls below this; at least 0
  double eps = 1e-8;     ///< a reduction by no more than this is left out, at least 0
};

/// The rules of torch.optim.lr_scheduler.ReduceLROnPlateau. A metric that is NaN is no progress. Not together with an
/// LrSchedule, which writes the same rates.
class ReduceOnPlateau {
 public:
  /// It refers to `optimizer`, which must outlive it. Throws ConfigError, with the field and its value, if one is out
  /// of its range.
  explicit ReduceOnPlateau(torch::optim::Optimizer& optimizer, PlateauOptions options = {});

  /// Once for each evaluation. True if it was one too many without progress: then the rate of every group has become
  /// max(rate * factor, min_lr), unless that is less than eps below it.
  bool step(double metric);

  /// The best metric so far; infinite (or, for Max, -infinite) before the first.
  double best() const { return best_; }

  /// What has been counted, under Python's names. The rates themselves are the optimizer's state. Loading throws
  /// CorruptFile, and has changed nothing, if a count is missing or negative.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  bool is_better(double metric) const;
  void reduce();

  torch::optim::Optimizer* optimizer_;
  PlateauOptions options_;
  double best_;
  int64_t bad_ = 0;
  int64_t cooldown_ = 0;
};

}  // namespace snug
