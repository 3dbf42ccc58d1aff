#include "snug/extra/gradient_noise.h"

#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::gradient_noise_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double squared_norm(const std::vector<double>& gradient) {
  double sum = 0;
  for (const double value : gradient) {
    sum += value * value;
  }
  return sum;
}

/// Gradients of items drawn from a normal distribution around `mean` in every coordinate, so |G|^2 = n mean^2 and
/// tr(S) = n deviation^2.
struct Gaussian {
  size_t coordinates;
  double mean, deviation;
  std::mt19937_64 generator{7};

  std::vector<double> gradient_of_one_item() {
    std::normal_distribution<double> draw(mean, deviation);
    std::vector<double> gradient(coordinates);
    for (double& value : gradient) {
      value = draw(generator);
    }
    return gradient;
  }

  /// `measured`: how many of the micro-batches are looked at by themselves, from the first on.
  bool add_step(GradientNoise& noise, int64_t small_items, int64_t micro_batches, int64_t measured) {
    std::vector<double> big(coordinates);
    double small_norms = 0;
    for (int64_t m = 0; m < micro_batches; ++m) {
      std::vector<double> small(coordinates);
      for (int64_t i = 0; i < small_items; ++i) {
        const auto gradient = gradient_of_one_item();
        for (size_t c = 0; c < coordinates; ++c) {
          small[c] += gradient[c] / static_cast<double>(small_items);
        }
      }
      small_norms += m < measured ? squared_norm(small) / static_cast<double>(measured) : 0;
      for (size_t c = 0; c < coordinates; ++c) {
        big[c] += small[c] / static_cast<double>(micro_batches);
      }
    }
    return noise.add(small_norms, small_items, squared_norm(big), small_items * micro_batches);
  }
};

TEST(GradientNoise, FindsTheNoiseScaleOfGaussianGradients) {
  for (const auto& [small_items, measured] : {std::pair{1, 8}, {4, 8}, {1, 1}, {4, 1}}) {
    Gaussian gaussian{.coordinates = 20, .mean = 0.5, .deviation = 2};  // |G|^2 = 5, tr(S) = 80, B = 16
    GradientNoise noise(0.999);
    for (int step = 0; step < 3000; ++step) {
      EXPECT_TRUE(gaussian.add_step(noise, small_items, 8, measured));
    }
    // One estimate of |G|^2 scatters by less than its own size here; averaged over a thousand steps, by some 3 %.
    EXPECT_NEAR(*noise.squared_gradient(), 5, 0.5) << small_items;
    EXPECT_NEAR(*noise.trace(), 80, 4) << small_items;
    EXPECT_NEAR(*noise.scale(), 16, 2) << small_items;
  }
}

TEST(GradientNoise, IsExactWhereTheNormsAreTheExpectedOnes) {
  // E|g_b|^2 = |G|^2 + tr(S) / b with |G|^2 = 3 and tr(S) = 24.
  GradientNoise noise;
  EXPECT_TRUE(noise.add(3 + 24.0 / 2, 2, 3 + 24.0 / 8, 8));
  EXPECT_DOUBLE_EQ(*noise.squared_gradient(), 3);
  EXPECT_DOUBLE_EQ(*noise.trace(), 24);
  EXPECT_DOUBLE_EQ(*noise.scale(), 8);
  EXPECT_TRUE(noise.add(3 + 24.0 / 4, 4, 3 + 24.0 / 16, 16)) << "sizes may change";
  EXPECT_DOUBLE_EQ(*noise.scale(), 8);
}

TEST(GradientNoise, DividesTheAveragesAndDoesNotAverageTheRatios) {
  GradientNoise noise(0.5);
  noise.add(1 + 10.0, 1, 1 + 5.0, 2);   // |G|^2 = 1, tr(S) = 10
  noise.add(4 + 20.0, 1, 4 + 10.0, 2);  // |G|^2 = 4, tr(S) = 20; weights 1/3 and 2/3
  EXPECT_DOUBLE_EQ(*noise.squared_gradient(), 3);
  EXPECT_DOUBLE_EQ(*noise.trace(), 50.0 / 3);
  EXPECT_DOUBLE_EQ(*noise.scale(), 50.0 / 9);
}

TEST(GradientNoise, IsNotKnownBeforeTheFirstStepNorWhileNoiseHidesTheGradient) {
  GradientNoise noise;
  EXPECT_FALSE(noise.scale() || noise.squared_gradient() || noise.trace());
  noise.add(10, 1, 1, 4);  // |G|^2 = (4 - 10) / 3 = -2
  EXPECT_FALSE(noise.scale());
  EXPECT_DOUBLE_EQ(*noise.squared_gradient(), -2);
  EXPECT_DOUBLE_EQ(*noise.trace(), 12);
}

TEST(GradientNoise, OfEqualGradientsIsZero) {
  GradientNoise noise;
  noise.add(2, 1, 2, 4);
  EXPECT_EQ(*noise.scale(), 0);
  noise.add(1.9, 1, 2, 4);
  EXPECT_EQ(*noise.scale(), 0) << "an estimate below 0 is no noise";
}

TEST(GradientNoise, PassesOverSkippedStepsAndBatchesThatWereNotSplit) {
  GradientNoise noise;
  noise.add(15, 2, 6, 8);
  const double before = *noise.scale();
  EXPECT_FALSE(noise.add(kInf, 2, 6, 8));
  EXPECT_FALSE(noise.add(15, 2, std::nan(""), 8));
  EXPECT_FALSE(noise.add(15, 8, 15, 8));
  EXPECT_EQ(*noise.scale(), before);
  EXPECT_NEAR(noise.sums().weight, 0.01, 1e-12);
}

TEST(GradientNoise, GoesOnFromSavedSumsToTheBit) {
  Gaussian gaussian{.coordinates = 5, .mean = 1, .deviation = 1};
  GradientNoise whole, first;
  for (int step = 0; step < 10; ++step) {
    gaussian.add_step(first, 2, 4, 4);
  }
  whole.load(first.sums());
  Gaussian copy = gaussian;
  gaussian.add_step(first, 2, 4, 4);
  copy.add_step(whole, 2, 4, 4);
  EXPECT_EQ(whole.scale(), first.scale());
  EXPECT_THROW(whole.load({.squared_gradient = kInf, .trace = 1, .weight = 0.5}), ConfigError);
  EXPECT_THROW(whole.load({.squared_gradient = 1, .trace = 1, .weight = 1.5}), ConfigError);
  EXPECT_EQ(whole.scale(), first.scale());
}

TEST(GradientNoise, RefusesSizesNormsAndDecaysThatAreNone) {
  GradientNoise noise;
  EXPECT_THROW(noise.add(1, 0, 1, 4), ConfigError);
  EXPECT_THROW(noise.add(1, 4, 1, 2), ConfigError);
  EXPECT_THROW(noise.add(-1, 1, 1, 4), ConfigError);
  EXPECT_THROW(noise.add(1, 1, -1, 4), ConfigError);
  for (const double decay : {-0.1, 1.0, std::nan("")}) {
    EXPECT_THROW(GradientNoise{decay}, ConfigError);
  }
  EXPECT_EQ(noise.sums().weight, 0);
}

}  // namespace
}  // namespace snug::gradient_noise_test
