#include <cmath>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/precision.h"
#include "src/precision/lost_updates.h"

namespace snug::gradient_statistics_test {
namespace {

using detail::LostUpdates;
using torch::Tensor;

Tensor with_gradient(const Tensor& gradient) {
  const Tensor p = torch::zeros_like(gradient).requires_grad_();
  p.mutable_grad() = gradient;
  return p;
}

int64_t count(const GradientStatistics& s, int exponent) {
  return s.exponents.at(static_cast<size_t>(exponent - GradientStatistics::kLowest));
}

TEST(GradientStatistics, CountZerosNonFiniteAndExponents) {
  const float inf = INFINITY;
  const auto p = with_gradient(torch::tensor(
      {0.0f, -0.0f, inf, -inf, NAN, 1.0f, -1.5f, 1.999f, 2.0f, 0x1p-24f, -0x1.8p-24f, 0x1p-149f, 0x1p100f}));
  const auto all = gradient_statistics({{"w", p}, {"frozen", torch::ones({2})}});
  ASSERT_EQ(all.size(), 1u);
  const auto& s = all[0];
  EXPECT_EQ(s.name, "w");
  EXPECT_EQ(s.elements, 13);
  EXPECT_EQ(s.zeros, 2);
  EXPECT_EQ(s.non_finite, 3);
  EXPECT_EQ(count(s, 0), 3);
  EXPECT_EQ(count(s, 1), 1);
  EXPECT_EQ(count(s, -24), 2);
  EXPECT_EQ(count(s, GradientStatistics::kLowest), 1);
  EXPECT_EQ(count(s, GradientStatistics::kHighest), 1);
}

TEST(GradientStatistics, AgreeWithFrexpOnRandomGradients) {
  torch::manual_seed(1);
  const Tensor g = torch::randn({10000}) * torch::exp2(torch::randint(-30, 10, {10000}));
  const auto s = gradient_statistics({{"w", with_gradient(g)}})[0];
  std::array<int64_t, GradientStatistics::kHighest - GradientStatistics::kLowest + 1> expected{};
  for (int64_t i = 0; i < g.numel(); ++i) {
    const int e = std::clamp(std::ilogb(g[i].item<float>()), GradientStatistics::kLowest, GradientStatistics::kHighest);
    ++expected[static_cast<size_t>(e - GradientStatistics::kLowest)];
  }
  EXPECT_EQ(s.exponents, expected);
}

// A BF16 weight of 1 moves by 2^-8 at least, one of 2^-6 by 2^-14.
TEST(LostUpdates, AreThoseThatDoNotMoveA16BitWeight) {
  for (const auto kept_in : {torch::kFloat, torch::kBFloat16}) {
    Tensor weight = torch::tensor({1.0f, 1.0f, 0x1p-6f, 1.0f, 0x1p-6f}).to(kept_in).requires_grad_();
    weight.mutable_grad() = torch::tensor({1.0f, 8.0f, 1.0f, 0.0f, -1.0f}).to(kept_in);
    const std::vector<std::pair<std::string, Tensor>> parameters{{"frozen", torch::ones({2})}, {"w", weight}};
    auto statistics = gradient_statistics(parameters);
    EXPECT_FALSE(statistics[0].lost_updates.has_value());
    const LostUpdates lost(parameters, torch::kBFloat16);
    {
      const torch::NoGradGuard no_grad;
      weight.sub_(weight.grad() * 0x1p-10);
    }
    lost.add_to(statistics);
    EXPECT_DOUBLE_EQ(statistics[0].lost_updates.value(), 0.25) << "the first of four; one was not to move";
  }
}

// What a user sees who trains in BF16 without masters (pytorch/pytorch#120376): a learning rate of 1e-3 does nothing to
// a weight of 1.
TEST(LostUpdates, AreAllOfThemWherePlainBf16TrainingStalls) {
  Tensor weight = torch::ones({8}, torch::kBFloat16).requires_grad_();
  torch::optim::SGD optimizer(std::vector{weight}, torch::optim::SGDOptions(1e-3));
  weight.mutable_grad() = torch::ones_like(weight);
  const std::vector<std::pair<std::string, Tensor>> parameters{{"w", weight}};
  auto statistics = gradient_statistics(parameters);
  const LostUpdates lost(parameters, torch::kBFloat16);
  optimizer.step();
  lost.add_to(statistics);
  EXPECT_EQ(statistics[0].lost_updates, 1.0);
}

TEST(LostUpdates, RefuseWhatDoesNotFit) {
  const auto p = with_gradient(torch::ones({2}));
  EXPECT_THROW(LostUpdates({{"w", p}}, torch::kFloat), ConfigError);
  std::vector<GradientStatistics> none;
  const LostUpdates lost({{"w", p}}, torch::kHalf);
  EXPECT_THROW(lost.add_to(none), ConfigError);
  auto statistics = gradient_statistics({{"w", p}});
  p.mutable_grad().reset();
  EXPECT_THROW(lost.add_to(statistics), ConfigError);
}

TEST(GradientStatistics, TakeLowPrecisionAndStridedGradients) {
  const Tensor g = torch::tensor({{1.0f, 2.0f}, {4.0f, 8.0f}}).to(torch::kBFloat16).t();
  const auto s = gradient_statistics({{"w", with_gradient(g)}})[0];
  for (const int e : {0, 1, 2, 3}) {
    EXPECT_EQ(count(s, e), 1);
  }
  EXPECT_TRUE(gradient_statistics({}).empty());
}

}  // namespace
}  // namespace snug::gradient_statistics_test
