#include "snug/clip.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "tests/support/lazy_gradient.h"
#include "tests/support/tensors.h"

namespace snug::clip_test {
namespace {

using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<Tensor> with_gradients(const std::vector<Tensor>& gradients) {
  std::vector<Tensor> parameters;
  for (const Tensor& gradient : gradients) {
    parameters.push_back(torch::zeros_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient.clone();
  }
  return parameters;
}

std::vector<Tensor> random_parameters(uint64_t seed = 3) {
  torch::manual_seed(seed);
  return with_gradients({torch::randn({4, 5}), torch::randn({100}), torch::randn({})});
}

TEST(ClipGradNorm, ScalesToTheNormAndReturnsTheOneBefore) {
  const auto p = with_gradients({torch::tensor({3.0f, 0.0f}), torch::tensor({4.0f})});
  const Tensor norm = clip_grad_norm_(p, 1.0);
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_EQ(norm.item<float>(), 5.0f);
  const float coefficient = 1.0f / (5.0f + 1e-6f);
  EXPECT_TRUE(torch::equal(p[0].grad(), torch::tensor({3.0f * coefficient, 0.0f})));
  EXPECT_TRUE(torch::equal(p[1].grad(), torch::tensor({4.0f * coefficient})));
}

TEST(ClipGradNorm, LeavesSmallGradientsToTheBit) {
  const auto p = random_parameters();
  const auto before = gradients_of(p);
  clip_grad_norm_(p, 1000.0);
  EXPECT_TRUE(same_bits(gradients_of(p), before));
}

// The norm of n numbers in FP32 is within about n u of the exact one in any order of summation, u = 2^-24; so are both
// coefficients, and their products round once more.
TEST(ClipGradNorm, EqualsTorchsClipping) {
  for (const double norm_type : {2.0, 1.0, 3.0, kInf}) {
    const auto mine = random_parameters();
    const auto theirs = random_parameters();
    const double norm = clip_grad_norm_(mine, 0.7, norm_type).item<double>();
    const double expected = torch::nn::utils::clip_grad_norm_(theirs, 0.7, norm_type);
    const double bound = 2 * 121 * std::ldexp(1.0, -24);
    EXPECT_NEAR(norm, expected, expected * bound) << norm_type;
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(testing::close_in_norm(mine[i].grad(), theirs[i].grad(), 2 * bound)) << norm_type;
    }
  }
}

TEST(ClipGradNorm, AllTensorsTogetherAreWithinTheNormAfterwards) {
  const auto p = random_parameters();
  clip_grad_norm_(p, 0.25);
  EXPECT_LE(grad_norm(p).item<double>(), 0.25);
  EXPECT_GT(grad_norm(p).item<double>(), 0.2499);
}

TEST(ClipGradNorm, WithTheInfinityNormLooksAtTheLargestNumber) {
  const auto p = with_gradients({torch::tensor({3.0f, -8.0f}), torch::tensor({4.0f})});
  EXPECT_EQ(clip_grad_norm_(p, 2.0, kInf).item<float>(), 8.0f);
  EXPECT_NEAR(p[0].grad()[1].item<float>(), -2.0f, 1e-6);
  EXPECT_NEAR(p[1].grad()[0].item<float>(), 1.0f, 1e-6);
}

TEST(ClipGradNorm, ToZeroMakesAllGradientsZero) {
  const auto p = random_parameters();
  clip_grad_norm_(p, 0.0);
  EXPECT_EQ(grad_norm(p).item<float>(), 0.0f);
}

TEST(ClipGradNorm, PassesOverParametersWithoutGradient) {
  auto p = with_gradients({torch::tensor({3.0f}), torch::tensor({4.0f})});
  p.push_back(torch::zeros({2}, torch::requires_grad()));
  EXPECT_EQ(clip_grad_norm_(p, 1.0).item<float>(), 5.0f);
  EXPECT_FALSE(p[2].grad().defined());
}

TEST(ClipGradNorm, WithoutAnyGradientTheNormIsZero) {
  EXPECT_EQ(clip_grad_norm_({}, 1.0).item<float>(), 0.0f);
  EXPECT_EQ(clip_grad_norm_({torch::zeros({2}, torch::requires_grad())}, 1.0).item<float>(), 0.0f);
}

TEST(ClipGradNorm, TakesGradientsOfSeveralDtypes) {
  const auto p = with_gradients({torch::full({1}, 3.0, torch::kBFloat16), torch::full({1}, 4.0, torch::kDouble)});
  const Tensor norm = clip_grad_norm_(p, 2.5);
  EXPECT_EQ(norm.scalar_type(), torch::kDouble);
  EXPECT_EQ(norm.item<float>(), 5.0f);
  EXPECT_EQ(p[0].grad().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(p[0].grad().item<float>(), 1.5f);
  EXPECT_NEAR(p[1].grad().item<double>(), 2.0, 1e-6);
}

// parameters() of a model with a shared module names its tensors twice; there is one gradient all the same.
TEST(ClipGradNorm, CountsAndScalesAParameterThatIsGivenTwiceOnce) {
  const auto p = with_gradients({torch::tensor({3.0f}), torch::tensor({4.0f})});
  EXPECT_EQ(grad_norm({p[0], p[1], p[0]}).item<float>(), 5.0f);
  EXPECT_EQ(clip_grad_norm_({p[0], p[1], p[0]}, 2.5).item<float>(), 5.0f);
  EXPECT_NEAR(p[0].grad().item<float>(), 1.5f, 1e-6);
}

TEST(ClipGradNorm, AGradientThatIsNotFiniteShowsInTheNorm) {
  auto p = with_gradients({torch::tensor({3.0f, std::numeric_limits<float>::infinity()}), torch::tensor({1.0f})});
  EXPECT_TRUE(std::isinf(clip_grad_norm_(p, 1.0).item<float>()));
  EXPECT_TRUE(std::isnan(p[0].grad()[1].item<float>())) << "as in Python";
  EXPECT_EQ(p[1].grad().item<float>(), 0.0f);
  p = with_gradients({torch::tensor({std::nanf("")}), torch::tensor({1.0f})});
  EXPECT_TRUE(std::isnan(clip_grad_norm_(p, 1.0).item<float>()));
  EXPECT_TRUE(std::isnan(p[1].grad().item<float>()));
}

TEST(ClipGradNorm, RefusesNormsThatAreNone) {
  const auto p = random_parameters();
  const auto before = gradients_of(p);
  EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_norm_(p, -1.0); }), HasSubstr("max_norm is -1"));
  EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_norm_(p, std::nan("")); }), HasSubstr("max_norm is nan"));
  EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_norm_(p, 1.0, 0.0); }), HasSubstr("norm_type is 0"));
  EXPECT_THAT(error_of<ConfigError>([&] { grad_norm(p, -2.0); }), HasSubstr("norm_type is -2"));
  EXPECT_TRUE(same_bits(gradients_of(p), before));
}

TEST(ClipGradNorm, TakesGradientsOfAnyLayoutAndEmptyOnes) {
  const auto p = with_gradients({torch::ones({2, 3}), torch::ones({0, 4}), torch::ones({2, 3, 4, 5})});
  p[0].mutable_grad() = torch::arange(6, torch::kFloat).reshape({3, 2}).t();
  p[2].mutable_grad() = torch::ones({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
  EXPECT_FLOAT_EQ(clip_grad_norm_(p, 0.0, 1.0).item<float>(), 15.0f + 120.0f);
  EXPECT_EQ(grad_norm(p).item<float>(), 0.0f);
}

TEST(ClipGradNorm, WithTheInfinityNormPassesOverEmptyGradients) {
  const auto p = with_gradients({torch::ones({0, 4}), torch::tensor({3.0f, -8.0f})});
  EXPECT_EQ(clip_grad_norm_(p, 2.0, kInf).item<float>(), 8.0f);
}

TEST(ClipGradNorm, WritesWhatAutogradSees) {
  const Tensor x = torch::ones({2}, torch::requires_grad());
  const Tensor gradient = torch::ones({2}, torch::requires_grad());
  x.mutable_grad() = gradient * 1;  // as after backward(create_graph)
  const int64_t version = x.grad()._version();
  clip_grad_norm_({x}, 0.5);
  EXPECT_GT(x.grad()._version(), version);
}

TEST(ClipGradNorm, TakesSparseGradientsWithRepeatedRows) {
  const auto gradient_of = [](bool sparse) {
    torch::manual_seed(1);
    auto embedding = torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(sparse));
    embedding->forward(torch::tensor({1, 3, 1})).sum().backward();
    EXPECT_EQ(embedding->weight.grad().is_sparse(), sparse);
    EXPECT_FLOAT_EQ(clip_grad_norm_(embedding->parameters(), 1.0).item<float>(), std::sqrt(10.0f));  // rows 2 2 and 1 1
    return embedding->weight.grad().to_dense();
  };
  EXPECT_TRUE(same_bits(gradient_of(true), gradient_of(false)));
}

TEST(GradNorm, IsTheNormAndChangesNothing) {
  const auto p = random_parameters();
  const auto before = gradients_of(p);
  double squares = 0;
  for (const Tensor& parameter : p) {
    squares += parameter.grad().to(torch::kDouble).pow(2).sum().item<double>();
  }
  EXPECT_NEAR(grad_norm(p).item<double>(), std::sqrt(squares), std::sqrt(squares) * 121 * std::ldexp(1.0, -24));
  EXPECT_TRUE(same_bits(gradients_of(p), before));
}

// 300 x 300 numbers of 1000 have the norm 300,000, past what FP16 holds.
TEST(ClipGradNorm, OfSixteenBitGradientsIsComputedInFp32) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const auto p = with_gradients({torch::full({300, 300}, 1000.0, dtype)});
    const Tensor norm = clip_grad_norm_(p, 1.0);
    EXPECT_EQ(norm.scalar_type(), torch::kFloat);
    EXPECT_NEAR(norm.item<double>(), 3e5, 30);
    EXPECT_GT(p[0].grad().min().item<double>(), 0);
    EXPECT_NEAR(grad_norm(p).item<double>(), 1, 1.0 / 256) << "a number of BF16 is within 2^-9 of what it stands for";
  }
}

TEST(ClipGradNorm, OfFp64GradientsIsFp64AlsoNextToOthers) {
  const Tensor wide = torch::tensor({1.0, 1e-12}, torch::kDouble);
  const Tensor norm = grad_norm(with_gradients({wide * 1e300}), 1.0);
  EXPECT_EQ(norm.scalar_type(), torch::kDouble);
  EXPECT_EQ(norm.item<double>(), (wide * 1e300).sum().item<double>());
  const auto p = with_gradients({torch::tensor({3.0f}), torch::tensor({4.0}, torch::kDouble)});
  EXPECT_EQ(clip_grad_norm_(p, 1.0).item<double>(), 5.0);
  EXPECT_NEAR(p[1].grad().item<double>(), 4 / (5 + 1e-6), 1e-15);
  EXPECT_EQ(p[0].grad().scalar_type(), torch::kFloat);
}

TEST(ClipGradNorm, TakesGradientsWhoseMemoryHasTheNegative) {
  const Tensor p = testing::one();
  testing::set_lazy_gradient(p);
  ASSERT_TRUE(p.grad().is_neg());
  EXPECT_FLOAT_EQ(clip_grad_norm_({p}, 0.35).item<float>(), 0.7f);
  EXPECT_NEAR(p.grad().item<float>(), 0.35, 1e-6);
}

}  // namespace
}  // namespace snug::clip_test
