#pragma once
// AccumulationWindow: the arithmetic of one optimizer step over several micro-batches: the weight of each loss, and the
// correction at the end. Stepper owns one; use it alone to write a loop of your own.
//
//   snug::AccumulationWindow window(model->named_parameters());
//   for (const auto& micro : parts) {
//     window.weigh(loss_of(micro), parts.size()).backward();
//   }
//   auto totals = window.close();        // gradients are now those of the mean over all items
//   if (totals.items > 0) optimizer.step();

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/accumulation/loss.h"

namespace snug {

class AccumulationWindow {
 public:
  struct Totals {
    int64_t items = 0;  ///< sum of the counts; 0: there is nothing to step for
    int64_t micro_batches = 0;
    at::Tensor mean_loss;     ///< FP64 scalar on the losses' device; undefined if items is 0
    double correction = 1.0;  ///< what the gradients were multiplied with: provisional over real number of items
  };

  /// For several processes that each have a share of the batch. Gets this process's number of items (not necessarily
  /// whole) and its sum of losses (undefined if it had none), and turns them into those of all processes.
  using SumOverRanks = std::function<void(double& items, at::Tensor& loss_sum)>;

  explicit AccumulationWindow(std::vector<std::pair<std::string, at::Tensor>> parameters);

  /// Opens the window: from here to close() no parameter may be written. If it is not called, the first weigh() opens
  /// the window.
  void begin();

  /// Sets the provisional divisor to `items`, >= 1. Call it before the first weigh(), with the same value in all
  /// processes whose gradients are added.
  void divide_by(double items);

  /// Returns the weighted loss; call backward() on it. `expected_parts`: the number of micro-batches of this size that
  /// the window will have. It sets the provisional divisor; only the value of the first call matters. For a micro-batch
  /// without items the result is undefined: skip its backward. Throws ConfigError if a parameter was written since the
  /// window was opened (naming it), if the kind of loss changes, or if a Loss::whole is not alone.
  at::Tensor weigh(const Loss& loss, double expected_parts);

  /// Throws ConfigError, naming the parameter, if one was written since the window was opened.
  void check_parameters() const;

  /// Ends the window: multiplies the gradients so that they are those of the mean over all items. Throws ConfigError if
  /// the number of items is not whole.
  Totals close(const SumOverRanks& sum_over_ranks = {});
  /// Ends the window and drops its gradients.
  void abandon();

  /// Micro-batches so far.
  int64_t size() const { return size_; }
  /// The factor that turns the gradients so far into those of the mean over the items so far. NaN without items, or if
  /// their number lies on a device.
  double to_mean() const;

 private:
  void reset();

  std::vector<std::pair<std::string, at::Tensor>> parameters_;
  bool is_open_ = false;
  std::vector<int64_t> versions_;
  int64_t size_ = 0;
  Loss::Kind kind_ = Loss::Kind::Sum;
  double provisional_ = 0;            // for counts on the host; 0: not chosen yet
  at::Tensor provisional_on_device_;  // for counts on a device, FP64 scalar; of the same value where both are there
  int64_t items_ = 0;
  at::Tensor items_on_device_;
  at::Tensor loss_sum_;
};

}  // namespace snug
