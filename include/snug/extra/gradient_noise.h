#pragma once
// GradientNoise: estimates up to which size a larger batch still pays, from the gradients of micro-batches and of the
// whole batch. Training with accumulation has both gradients anyway.
//
//   snug::GradientNoise noise;
//   noise.add(mean_of_squared_norms_of_micro_batches, 8, squared_norm_of_their_mean, 64);
//   if (auto scale = noise.scale()) std::cout << "batches far above " << *scale << " items are wasted\n";

#include <cstdint>
#include <optional>

namespace snug {

/// The simple noise scale B = tr(S) / |G|^2 of McCandlish et al. 2018 (arXiv:1812.06162): S is the covariance of the
/// gradient of one item, G the mean of the gradient. At a batch of B items noise and gradient are equally large. Far
/// below B, twice the batch halves the number of steps; far above B, twice the batch saves next to nothing.
class GradientNoise {
 public:
  /// The state between steps, to save with a run.
  struct Sums {
    double squared_gradient = 0;  ///< the weighted sum of the estimates of |G|^2
    double trace = 0;             ///< the weighted sum of the estimates of tr(S)
    double weight = 0;            ///< the weight of both sums; 0 before the first step, then towards 1
  };

  /// `decay`: of the averages over steps, from 0 (the last step alone) to below 1. Throws ConfigError unless 0 <= decay
  /// < 1.
  explicit GradientNoise(double decay = 0.99);

  /// Adds one step. `small_sq_norm_mean`: the mean of |g|^2 over one or more micro-batches, with g the mean gradient of
  /// the small_items in one micro-batch. `big_sq_norm`: |g|^2 of the mean gradient of all big_items. Take both norms
  /// before clipping, with the loss scale divided out. The estimates of appendix A.1 are unbiased for micro-batches of
  /// one size that are drawn independently:
  ///   |G|^2 = (big_items * big - small_items * small) / (big_items - small_items)
  ///   tr(S) = (small - big) / (1 / small_items - 1 / big_items)
  /// The estimates use only E|g|^2 = |G|^2 + tr(S) / items, which holds for each size by itself. So one micro-batch is
  /// enough, and the micro-batch may be a part of the batch: estimates then scatter more, but are not wrong. Stepper
  /// gives the norm of the first micro-batch, which needs no memory and costs one norm. After the first micro-batch
  /// .grad holds sums; the gradients of a later micro-batch alone need a copy of all gradients.
  /// Returns false, and counts nothing, if the step teaches nothing: both batches have the same size, or a norm is not
  /// finite, as in a skipped step. Throws ConfigError for sizes below 1, big_items < small_items or a norm below 0.
  bool add(double small_sq_norm_mean, int64_t small_items, double big_sq_norm, int64_t big_items);

  /// B in items: the quotient of the averages of numerator and denominator, because the mean of quotients is biased.
  /// Empty before the first step, and while the average of |G|^2 is not above 0. In the second case noise hides the
  /// gradient: average over more steps.
  std::optional<double> scale() const;

  /// The averages themselves, empty before the first step. Estimates of single steps scatter, so either average may be
  /// below 0.
  std::optional<double> squared_gradient() const;
  std::optional<double> trace() const;

  /// The whole state, for a snapshot.
  const Sums& sums() const { return sums_; }
  /// Throws ConfigError unless all numbers are finite and the weight is from 0 to 1.
  void load(const Sums& sums);

 private:
  double decay_;
  Sums sums_;
};

}  // namespace snug
