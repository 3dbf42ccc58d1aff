#pragma once
// Loss: the result of a loss function for Stepper: a value and the number of items that it was taken over. With both,
// accumulation is exact for any split: sum of sums over sum of counts, never a mean of means.
//
//   return snug::Loss::sum(cross_entropy_sum(logits, target), target.numel());
//   return snug::Loss::mean(torch::mse_loss(y, t), y.numel());      // for criteria that average

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace snug {

class Loss {
 public:
  /// Sum and Mean come with a count of items; Whole comes with none.
  enum class Kind { Sum, Mean, Whole };

  /// `sum`: scalar, the sum over the items of this micro-batch. `count`: the number of these items (tokens, pixels,
  /// samples).
  static Loss sum(at::Tensor sum, int64_t count);
  /// The count as a scalar tensor, such as the number of tokens that are not ignored. It is read once, when all
  /// backward passes of the step are queued. ConfigError then, unless the counts of the step, over all ranks, add up to
  /// a whole number.
  static Loss sum(at::Tensor sum, at::Tensor count);
  /// `mean`: scalar, averaged over `count` items. A micro-batch with count 0 is left out, NaN or not.
  static Loss mean(at::Tensor mean, int64_t count);
  /// The count is read at once, which waits for its device, because a mean over no items must not go backward. Throws
  /// ConfigError unless the count is whole.
  static Loss mean(at::Tensor mean, at::Tensor count);
  /// A loss that is no sum over items (contrastive losses, for example): its batch must not be split.
  static Loss whole(at::Tensor loss);

  /// Which of the functions above made it, and the scalar that it was given.
  Kind kind() const { return kind_; }
  const at::Tensor& value() const { return value_; }
  /// The count, read from the device if it is there.
  int64_t count() const;
  const at::Tensor& count_tensor() const { return count_tensor_; }

 private:
  Loss(Kind kind, at::Tensor value, int64_t count, at::Tensor count_tensor);

  Kind kind_;
  at::Tensor value_;
  int64_t count_;
  at::Tensor count_tensor_;  // undefined: count_ holds it
};

namespace detail {

/// A count of items that was read from a tensor. Throws ConfigError unless it is whole and >= 0.
int64_t whole_count(double count);

/// The count of a loss, read from the device if it is there. It need not be whole: only the sum of all counts of a step
/// must be.
double count_of(const Loss& loss);

}  // namespace detail
}  // namespace snug
