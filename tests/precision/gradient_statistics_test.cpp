#include "snug/precision/gradient_statistics.h"

#include <cmath>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace snug {
namespace {

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

TEST(GradientStatistics, TellWhatUnderflowsWithAndWithoutAScale) {
  const auto s = gradient_statistics({{"w", with_gradient(torch::tensor({0.0f, 0x1p-30f, 0x1p-20f, 1.0f}))}})[0];
  EXPECT_DOUBLE_EQ(s.share_below(0x1p-24), 0.5);
  EXPECT_DOUBLE_EQ(s.share_below(0x1p-24, 65536), 0.25);
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
}  // namespace snug
