#pragma once
// Loss: the result of a loss function for Stepper: a value, and the number of items over which the value was taken.
// With both, accumulation is exact for any split: sum of sums over sum of counts, never a mean of means.
//
//   return snug::Loss::sum(cross_entropy_sum(logits, target), target.numel());
//   return snug::Loss::mean(torch::mse_loss(y, t), y.numel());      // for criteria that average
//   return snug::Loss::mean(loss, y.numel()).with("dice", dice);    // with a number to report
//
// Batch: tensors that belong together along dimension 0. micro_batches: the same data in smaller parts.
//
//   snug::Batch batch{images, labels};                        // 512 of each
//   for (const auto& micro : snug::micro_batches(batch, 100)) // 100, 100, 100, 100, 100, 12
//     ...
//
// A batch type B of your own has two functions, with the meaning of Batch's:
// - `int64_t size() const`
// - `B slice(int64_t begin, int64_t end) const`
//
// Two more functions are optional:
// - `B to(c10::Device) const`, if Stepper shall move micro-batches to the model's device;
// - `Batch::Shape shape() const`, if items differ in size and the Stepper has a budget.
//
// AccumulationWindow: the arithmetic of one optimizer step over several micro-batches: the weight of each loss, and the
// correction at the end. Stepper owns a window; use AccumulationWindow alone to write a loop of your own.
//
//   snug::AccumulationWindow window(model->named_parameters());
//   for (const auto& micro : parts) {
//     window.weigh(loss_of(micro), parts.size()).backward();
//   }
//   auto totals = window.close();        // gradients are now those of the mean over all items
//   if (totals.items > 0) optimizer.step();

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

class Loss {
 public:
  /// Sum and Mean have a count of items; Whole has no count.
  enum class Kind { Sum, Mean, Whole };

  /// `sum`: scalar, the sum over the items of this micro-batch. `count`: the number of items (tokens, pixels, samples).
  static Loss sum(at::Tensor sum, int64_t count);
  /// The count as a scalar tensor, such as the number of tokens that are not ignored. The count is read once, when all
  /// backward passes of the step are queued, without a wait for the passes. The step then throws ConfigError, unless
  /// the counts of the step, over all ranks, add up to a whole number.
  static Loss sum(at::Tensor sum, at::Tensor count);
  /// `mean`: scalar, averaged over `count` items. A micro-batch with count 0 is left out, NaN or not.
  static Loss mean(at::Tensor mean, int64_t count);
  /// A loss that is not a sum over items (contrastive losses, for example). The batch of such a loss must not be split.
  static Loss whole(at::Tensor loss);

  /// The same loss with a metric: a number to report, without gradient. `value`: a scalar tensor, made as the loss is:
  /// the sum over the items for sum(), the mean over the items for mean(). StepResult::metric(name) is the mean over
  /// all items of the step. For whole(), the batch is the one item: metric(name) is `value`, or on several ranks the
  /// mean of the ranks' values. Give `value` on the loss's device, or on the host: nothing then waits for `value` in
  /// the step. A value of a device beside a loss on the host waits for the device. Throws ConfigError for a value that
  /// is not a scalar, a name that the Loss has already, or more than 63 metrics.
  Loss with(const std::string& name, const at::Tensor& value) const;
  /// The metrics, in the order of the calls of with().
  const std::vector<std::pair<std::string, at::Tensor>>& metrics() const { return metrics_; }

  /// Which function made the Loss, and the scalar given to the function.
  Kind kind() const { return kind_; }
  const at::Tensor& value() const { return value_; }
  /// The count, read from the device if the count is on a device.
  int64_t count() const;
  const at::Tensor& count_tensor() const { return count_tensor_; }

 private:
  Loss(Kind kind, at::Tensor value, int64_t count, at::Tensor count_tensor);

  Kind kind_;
  at::Tensor value_;
  int64_t count_;
  at::Tensor count_tensor_;  // undefined: the count is in count_
  std::vector<std::pair<std::string, at::Tensor>> metrics_;
};

namespace detail {

/// A count of items, after reading from a tensor. Throws ConfigError unless the count is whole and >= 0.
int64_t whole_count(double count);

/// The most metrics of a Loss. Ranks have room for so many before a step ends.
inline constexpr int64_t kMostMetrics = 63;

/// The count of a loss, read from the device if the count is on a device. The count need not be whole: only the sum of
/// all counts of a step must be whole.
double count_of(const Loss& loss);

}  // namespace detail

class Batch {
 public:
  /// The size of an item. Size and number of items decide how much memory a model needs for the items.
  struct Shape {
    /// Type and sizes of each tensor, without dimension 0.
    std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> tensors = {};

    friend bool operator==(const Shape&, const Shape&) = default;
  };

  /// Throws ConfigError unless all tensors have the same size along dimension 0.
  Batch(std::initializer_list<at::Tensor> tensors);
  explicit Batch(std::vector<at::Tensor> tensors);

  const at::Tensor& operator[](size_t index) const { return tensors_.at(index); }
  /// Items: the size along dimension 0.
  int64_t size() const { return tensors_.front().size(0); }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  /// Items begin to end - 1, as views.
  Batch slice(int64_t begin, int64_t end) const;
  /// The batch on `device`: the same tensors if the tensors are on `device` already. Host tensors go to another device
  /// through pinned memory, without waiting.
  Batch to(c10::Device device) const;
  /// The size of the items.
  Shape shape() const;

 private:
  std::vector<at::Tensor> tensors_;
};

/// Views of `batch` with `size` items each. The last view may be smaller; nothing is dropped. Throws ConfigError unless
/// size >= 1.
std::vector<Batch> micro_batches(const Batch& batch, int64_t size);

class AccumulationWindow {
 public:
  struct Totals {
    int64_t items = 0;  ///< sum of the counts; 0: nothing to step for
    int64_t micro_batches = 0;
    at::Tensor mean_loss;  ///< FP64 scalar on the losses' device; undefined if items is 0
    /// Means over the items, as mean_loss. Empty if items is 0, and in a process that called weigh() for no Loss,
    /// because such a process knows no names.
    std::map<std::string, at::Tensor> metrics;
    double correction = 1.0;  ///< the factor that gradients were multiplied with: provisional over real number of items
  };

  /// For several processes that each have a share of the batch. The function gets this process's number of items (not
  /// necessarily whole) and sum of losses (undefined without items), and turns both into the sums over all processes.
  /// If losses have metrics, `loss_sum` is a vector: the sum of losses, then the sums of the metrics.
  using SumOverRanks = std::function<void(double& items, at::Tensor& loss_sum)>;

  explicit AccumulationWindow(std::vector<std::pair<std::string, at::Tensor>> parameters);

  /// Opens the window: from begin() to close() no parameter may be written. Without begin(), the first weigh() opens
  /// the window.
  void begin();

  /// Sets the provisional divisor to `items`, >= 1. Call divide_by() before the first weigh(), with the same value in
  /// all processes whose gradients are added.
  void divide_by(double items);

  /// Returns the weighted loss; call backward() on the result. `expected_parts`: the number of micro-batches of this
  /// size that the window will have. The number sets the provisional divisor; only the value of the first call matters.
  /// For a micro-batch without items the result is undefined: skip the backward of the micro-batch. Throws ConfigError:
  /// - if a parameter was written since the window was opened, naming the parameter;
  /// - if the kind of loss, or the names of metrics, change;
  /// - if a Loss::whole is not alone.
  at::Tensor weigh(const Loss& loss, double expected_parts);

  /// Throws ConfigError, naming the parameter, if a parameter was written since the window was opened.
  void check_parameters() const;

  /// Ends the window: multiplies the gradients, which become the gradients of the mean over all items. Throws
  /// ConfigError if the number of items is not whole.
  Totals close(const SumOverRanks& sum_over_ranks = {});
  /// Ends the window and drops the window's gradients.
  void abandon();

  /// Micro-batches so far.
  int64_t size() const { return size_; }
  /// The factor from the gradients so far to the gradients of the mean over the items so far. NaN without items, or if
  /// the number of items lies on a device.
  double to_mean() const;

 private:
  friend class Stepper;
  void reset();

  std::vector<std::pair<std::string, at::Tensor>> parameters_;
  bool is_open_ = false;
  std::vector<int64_t> versions_;
  int64_t size_ = 0;
  Loss::Kind kind_ = Loss::Kind::Sum;
  double provisional_ = 0;            // for counts on the host; 0: not chosen yet
  at::Tensor provisional_on_device_;  // for counts on a device, FP64 scalar; equal to provisional_ if both exist
  int64_t items_ = 0;
  at::Tensor items_on_device_;
  std::function<at::Tensor()> counts_;  // on the host: items_on_device_ and provisional_on_device_
  at::Tensor loss_sum_;                 // and the sums of metrics
  std::vector<std::string> metrics_;    // names
};

}  // namespace snug
