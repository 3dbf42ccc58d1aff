#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/precision_ablation.h"
#include "tests/support/tensors.h"

// Why mixed precision is made of several things: without them training in 16 bits fails in known ways.

namespace snug::ablation_test {
namespace {

using testing::AblationRun;
using testing::Recipe;
using testing::train_ablation;

constexpr int kSteps = 100;

const AblationRun& fp32_run() {
  static const AblationRun run = train_ablation(testing::kFp32, kSteps);
  return run;
}

// Every loss is within a hundred roundings of FP32's: 2^-11 of each value in FP16, 2^-8 in BF16, and training amplifies
// it no more than that here.
void expect_curve_of_fp32(const AblationRun& run, c10::ScalarType dtype) {
  const double rounding = std::ldexp(1.0, dtype == torch::kHalf ? -11 : -8);
  for (size_t step = 0; step < run.losses.size(); ++step) {
    const double expected = fp32_run().losses[step];
    ASSERT_NEAR(run.losses[step], expected, std::min(100 * rounding, 0.1) * expected) << "step " << step;
  }
}

// Updates are smaller than half the distance of 16-bit numbers.
TEST(PrecisionAblation, Pure16BitTrainingStandsStillBecauseUpdatesAreRoundedAway) {
  for (const Recipe& recipe : {testing::kPureFp16, testing::kPureBf16}) {
    const auto run = train_ablation(recipe, 10);
    EXPECT_EQ(run.unchanged_weights, 1.0) << recipe.name;
    EXPECT_EQ(run.losses.back(), run.losses.front()) << recipe.name;
  }
}

TEST(PrecisionAblation, MastersAloneTrainOnTheFewFp16GradientsThatDoNotUnderflow) {
  const auto masters = train_ablation(testing::kMasters, kSteps);
  EXPECT_EQ(fp32_run().zero_gradients, 0);
  EXPECT_GT(masters.zero_gradients, 0.7);
  EXPECT_GT(masters.gradient_error, 0.5);
  EXPECT_GT(masters.losses.back(), 1.2 * fp32_run().losses.back());
}

TEST(PrecisionAblation, LossScalingBringsTheGradientsBack) {
  const auto scaled = train_ablation(testing::kScaling, 1);
  EXPECT_LT(scaled.zero_gradients, 0.02);
  EXPECT_LT(scaled.gradient_error, 0.01);
}

// A sum of FP16 numbers in FP16 rounds once a summand, one in FP32 hardly at all: what is left is the rounding of the
// summands.
TEST(PrecisionAblation, Fp32AccumulationKeepsAnErrorThatGrowsWithTheNumberOfMicroBatchesIfSummedInFp16) {
  const auto errors = [](int64_t micro_batch) {
    return std::pair{train_ablation(testing::kScaling, 1, torch::kCPU, micro_batch).gradient_error,
                     train_ablation(testing::kAccumulation, 1, torch::kCPU, micro_batch).gradient_error};
  };
  const auto [few_in_fp16, few_in_fp32] = errors(64);
  const auto [many_in_fp16, many_in_fp32] = errors(1);
  EXPECT_GT(many_in_fp16, 2 * few_in_fp16);
  EXPECT_GT(many_in_fp16, 3 * many_in_fp32);
  EXPECT_LT(many_in_fp32, 1.5 * few_in_fp32);
  EXPECT_LT(many_in_fp32, std::ldexp(1.0, -10));
}

TEST(PrecisionAblation, TheWholeFp16RecipeHasTheLossCurveOfFp32WithMastersAsWithAutocast) {
  for (const Recipe& recipe : {testing::kAccumulation, testing::kAutocast}) {
    SCOPED_TRACE(recipe.name);
    const auto run = train_ablation(recipe, kSteps);
    EXPECT_LT(run.zero_gradients, 0.02);
    expect_curve_of_fp32(run, torch::kHalf);
  }
}

TEST(PrecisionAblation, Bf16HasTheLossCurveOfFp32WithoutLossScaling) {
  for (const Recipe& recipe : {testing::kBf16Masters, testing::kBf16Autocast}) {
    SCOPED_TRACE(recipe.name);
    const auto run = train_ablation(recipe, kSteps);
    EXPECT_EQ(run.zero_gradients, 0);
    expect_curve_of_fp32(run, torch::kBFloat16);
  }
}

TEST(PrecisionAblation, HoldsOnCudaToo) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "no CUDA device";
  }
  EXPECT_EQ(train_ablation(testing::kPureFp16, 10, torch::kCUDA).unchanged_weights, 1.0);
  EXPECT_GT(train_ablation(testing::kMasters, 1, torch::kCUDA).zero_gradients, 0.7);
  for (const Recipe& recipe :
       {testing::kAccumulation, testing::kAutocast, testing::kBf16Masters, testing::kBf16Autocast}) {
    SCOPED_TRACE(recipe.name);
    expect_curve_of_fp32(train_ablation(recipe, kSteps, torch::kCUDA), recipe.dtype);
  }
}

// The chain rule is linear in the loss: one factor at the end is the same factor in every layer, exactly so for a power
// of two. That is why the loss is scaled and not each layer.
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
}  // namespace snug::ablation_test
