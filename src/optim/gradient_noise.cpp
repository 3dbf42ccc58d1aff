#include "snug/extra/gradient_noise.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug {

GradientNoise::GradientNoise(double decay) : decay_(decay) {
  if (!(decay_ >= 0 && decay_ < 1)) {
    throw ConfigError(fmt::format("GradientNoise: decay is {}; give a number from 0 to below 1", decay_));
  }
}

bool GradientNoise::add(double small_sq_norm_mean, int64_t small_items, double big_sq_norm, int64_t big_items) {
  if (small_items < 1 || big_items < small_items) {
    throw ConfigError(
        fmt::format("GradientNoise.add: small_items is {} and big_items {}; give the items of a micro-batch, at least "
                    "1, and of all of them",
                    small_items, big_items));
  }
  if (small_sq_norm_mean < 0 || big_sq_norm < 0) {
    throw ConfigError(fmt::format("GradientNoise.add: the squared norms are {} and {}; neither can be below 0",
                                  small_sq_norm_mean, big_sq_norm));
  }
  if (small_items == big_items || !std::isfinite(small_sq_norm_mean) || !std::isfinite(big_sq_norm)) {
    return false;
  }
  const auto small = static_cast<double>(small_items);
  const auto big = static_cast<double>(big_items);
  const double squared_gradient = (big * big_sq_norm - small * small_sq_norm_mean) / (big - small);
  const double trace = (small_sq_norm_mean - big_sq_norm) / (1 / small - 1 / big);
  sums_.squared_gradient = decay_ * sums_.squared_gradient + (1 - decay_) * squared_gradient;
  sums_.trace = decay_ * sums_.trace + (1 - decay_) * trace;
  sums_.weight = decay_ * sums_.weight + (1 - decay_);
  return true;
}

std::optional<double> GradientNoise::scale() const {
  if (!(sums_.squared_gradient > 0)) {
    return std::nullopt;
  }
  return std::max(sums_.trace, 0.0) / sums_.squared_gradient;
}

std::optional<double> GradientNoise::squared_gradient() const {
  return sums_.weight > 0 ? std::optional(sums_.squared_gradient / sums_.weight) : std::nullopt;
}

std::optional<double> GradientNoise::trace() const {
  return sums_.weight > 0 ? std::optional(sums_.trace / sums_.weight) : std::nullopt;
}

void GradientNoise::load(const Sums& sums) {
  if (!std::isfinite(sums.squared_gradient) || !std::isfinite(sums.trace) || !(sums.weight >= 0 && sums.weight <= 1)) {
    throw ConfigError(
        fmt::format("GradientNoise.load: the sums are {}, {} and {}; they must be finite, and the weight from 0 to 1",
                    sums.squared_gradient, sums.trace, sums.weight));
  }
  sums_ = sums;
}

}  // namespace snug
