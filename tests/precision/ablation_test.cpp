#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/precision_ablation.h"
#include "tests/support/tensors.h"

// Why mixed precision is made of several things: without them training in FP16 fails in known ways.

namespace snug {
namespace {

using testing::Recipe;
using testing::train_ablation;

constexpr int kSteps = 100;

TEST(PrecisionAblation, PureFp16StandsStillBecauseUpdatesAreRoundedAway) {
  const auto run = train_ablation(Recipe::PureFp16, 10);
  EXPECT_EQ(run.unchanged_weights, 1.0);
  EXPECT_EQ(run.losses.back(), run.losses.front());
}

TEST(PrecisionAblation, MastersAloneTrainOnTheFewGradientsThatDoNotUnderflow) {
  const auto full = train_ablation(Recipe::Fp32, kSteps);
  const auto masters = train_ablation(Recipe::Masters, kSteps);
  EXPECT_EQ(full.zero_gradients, 0);
  EXPECT_GT(masters.zero_gradients, 0.7);
  EXPECT_GT(masters.losses.back(), 1.2 * full.losses.back());

  // With loss scaling and FP32 accumulation the curve is that of FP32. FP16 has 11 bits: 2^-11 of each value, and training amplifies it
  // no more than a hundredfold here.
  const auto recipe = train_ablation(Recipe::Fp32Accumulation, kSteps);
  EXPECT_LT(recipe.zero_gradients, 0.02);
  for (int i = 0; i < kSteps; ++i) {
    const auto step = static_cast<size_t>(i);
    ASSERT_NEAR(recipe.losses[step], full.losses[step], 100 * std::ldexp(1.0, -11) * full.losses[step]) << "step " << i;
  }
}

// The chain rule is linear in the loss: one factor at the end is the same factor in every layer, exactly so for a power of two. That is why
// the loss is scaled and not each layer.
TEST(PrecisionAblation, ScalingTheLossScalesEveryLayersGradientByExactlyThat) {
  const auto gradients = [](double scale) {
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})), torch::nn::Linear(16, 16),
                                torch::nn::GELU(), torch::nn::Linear(16, 1));
    (model->forward(torch::randn({32, 8})).square().mean() * scale).backward();
    std::vector<torch::Tensor> all;
    for (const auto& p : model->parameters()) {
      all.push_back(p.grad() / scale);
    }
    return all;
  };
  EXPECT_TRUE(testing::same_bits(gradients(65536), gradients(1)));
}

}  // namespace
}  // namespace snug
