#pragma once
// PowerSGD: gradients of matrices travel as products of two thin ones. What is lost goes into the next step's gradient.
//
// A step that is dropped, or skipped for its scale, leaves what it lost to the next one as any step does; a way back
// would take one more copy of the gradients. Where that is not finite it is forgotten, and so is what was to be made up
// for until then.
//
//   snug::DataParallel ddp(model, group, {.hook = snug::power_sgd_hook({.rank = 2})});  // a hook for one DataParallel

#include <cstdint>

#include "snug/distributed/comm_hook.h"

namespace snug {

struct PowerSgdOptions {
  /// Columns of the thin matrices: a gradient of n x m numbers is sent as rank * (n + m) numbers. More columns are
  /// slower and more accurate.
  int64_t rank = 1;
  /// The number of first steps whose gradients are sent unchanged, because gradients change much at the beginning.
  int64_t start_step = 1000;
  /// Matrices that would shrink by this factor or less are sent unchanged, as vectors are.
  double min_compression = 2;
  /// Adds what a step lost to the next one's gradient. Costs one more copy of the gradients.
  bool error_feedback = true;
  /// Starts from the last step's matrices, not from random ones: one power iteration continued over the steps.
  bool warm_start = true;
  /// Of the random matrices; the same on all ranks.
  uint64_t seed = 0;
};

/// Each DataParallel needs a hook of its own, which keeps its state. Throws ConfigError for options that cannot work.
/// Algorithm: Vogels, Karimireddy, Jaggi 2019 (arXiv 1905.13727), algorithms 1 and 2.
CommHook power_sgd_hook(PowerSgdOptions options = {});

}  // namespace snug
