#include "snug/extra/bias_gelu.h"

#include <any>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "tests/support/tensors.h"

namespace snug::bias_gelu_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

Tensor composed(const Tensor& x, const Tensor& bias) { return at::gelu(bias.defined() ? at::add(x, bias) : x, "tanh"); }

/// x, bias and the gradient from above.
struct Inputs {
  Tensor x, bias, upstream;

  Inputs(at::IntArrayRef shape, c10::ScalarType dtype, c10::Device device = torch::kCPU) {
    torch::manual_seed(3);
    x = (torch::randn(shape) * 2).to(device, dtype).requires_grad_();
    bias = torch::randn({shape.back()}).to(device, dtype).requires_grad_();
    upstream = torch::randn(shape).to(device, dtype);
  }
  /// Value and gradients of x and the bias.
  template <class Function>
  std::vector<Tensor> run(Function&& function, bool with_bias = true) {
    x.mutable_grad().reset();
    bias.mutable_grad().reset();
    const Tensor y = function(x, with_bias ? bias : Tensor());
    y.backward(upstream);
    return {y.detach(), x.grad(), bias.grad()};
  }
};

class BiasGeluOnCpu : public ::testing::TestWithParam<c10::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, BiasGeluOnCpu,
                         ::testing::Values(torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16),
                         [](const auto& tested) { return c10::toString(tested.param); });

TEST_P(BiasGeluOnCpu, IsTheComposedFormToTheBitWithItsGradients) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{7}, {5, 1}, {33, 70}, {3, 5, 64}, {0, 8}, {4, 0}}) {
    SCOPED_TRACE(::testing::PrintToString(shape));
    Inputs inputs(shape, GetParam());
    EXPECT_TRUE(same_bits(inputs.run(bias_gelu), inputs.run(composed)));
    EXPECT_TRUE(same_bits(inputs.run(bias_gelu, false), inputs.run(composed, false)));
  }
}

TEST_P(BiasGeluOnCpu, IsTheComposedFormToTheBitForLayoutsWithGaps) {
  const auto transposed = [](auto function) {
    return [function](const Tensor& x, const Tensor& bias) { return function(x.t(), bias).t(); };
  };
  const auto every_other = [](auto function) {
    return [function](const Tensor& x, const Tensor& bias) {
      return function(x.slice(1, 0, 64, 2), bias.slice(0, 0, 64, 2)).repeat({1, 2});
    };
  };
  Inputs inputs({64, 64}, GetParam());
  EXPECT_TRUE(same_bits(inputs.run(transposed(bias_gelu)), inputs.run(transposed(composed))));
  EXPECT_TRUE(same_bits(inputs.run(every_other(bias_gelu)), inputs.run(every_other(composed))));
}

TEST_P(BiasGeluOnCpu, LeavesItsInputsAsTheyWere) {
  Inputs inputs({9, 16}, GetParam());
  const auto before = testing::clones_of({inputs.x, inputs.bias, inputs.upstream});
  inputs.run(bias_gelu);
  inputs.run(bias_gelu, false);
  EXPECT_TRUE(same_bits({inputs.x.detach(), inputs.bias.detach(), inputs.upstream}, before));
}

TEST(BiasGelu, GivesAGradientOnlyToWhatAsksForOne) {
  for (const auto& [for_x, for_bias] : {std::pair{true, false}, {false, true}, {false, false}}) {
    Inputs inputs({6, 8}, torch::kFloat);
    inputs.x.requires_grad_(for_x);
    inputs.bias.requires_grad_(for_bias);
    const Tensor y = bias_gelu(inputs.x, inputs.bias);
    ASSERT_EQ(y.requires_grad(), for_x || for_bias);
    if (y.requires_grad()) {
      y.backward(inputs.upstream);
    }
    EXPECT_EQ(inputs.x.grad().defined(), for_x);
    EXPECT_EQ(inputs.bias.grad().defined(), for_bias);
  }
}

TEST(BiasGelu, MayBeDifferentiatedTwiceLikeTheComposedForm) {
  Inputs inputs({5, 6}, torch::kDouble);
  const auto penalty = [&](auto function) {
    const Tensor y = function(inputs.x, inputs.bias);
    const auto first = torch::autograd::grad({y}, {inputs.x, inputs.bias}, {inputs.upstream}, true, true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {inputs.x, inputs.bias});
  };
  EXPECT_TRUE(same_bits(penalty(bias_gelu), penalty(composed)));
}

std::vector<const void*> saved_by(const std::function<Tensor()>& forward) {
  std::vector<const void*> saved;
  const SavedTensorHooks hooks(
      [&](const Tensor& t) {
        saved.push_back(t.const_data_ptr());
        return std::any(t.detach());
      },
      [](std::any& kept) { return std::any_cast<Tensor>(kept); });
  const Tensor y = forward();
  return saved;
}

TEST(BiasGelu, SavesItsInputsAndNothingElse) {
  Inputs inputs({32, 64}, torch::kFloat);
  EXPECT_THAT(saved_by([&] { return bias_gelu(inputs.x, inputs.bias); }),
              ::testing::ElementsAre(inputs.x.const_data_ptr(), inputs.bias.const_data_ptr()));
  EXPECT_THAT(saved_by([&] { return composed(inputs.x, inputs.bias); }),
              ::testing::ElementsAre(::testing::Ne(inputs.x.const_data_ptr())))
      << "the composed form saves the sum";
}

MemoryMeter::Report measured(const std::function<Tensor()>& forward, const Tensor& upstream) {
  const MemoryMeter meter;
  const Tensor y = forward();
  auto report = meter.report();
  const int64_t after_forward = report.live_bytes;
  y.backward(upstream);
  report = meter.report();
  report.live_bytes = after_forward;
  return report;
}

// x is alive anyway, here because the caller holds it. What is left of the forward pass is y; of the composed one also
// the sum.
TEST(BiasGelu, HoldsOneActivationLessThanTheComposedFormWhereTheInputStaysAlive) {
  Inputs inputs({128, 64}, torch::kFloat);
  constexpr int64_t kActivation = 128 * 64 * 4;
  const auto ours = measured([&] { return bias_gelu(inputs.x, inputs.bias); }, inputs.upstream);
  inputs.x.mutable_grad().reset();
  inputs.bias.mutable_grad().reset();
  const auto theirs = measured([&] { return composed(inputs.x, inputs.bias); }, inputs.upstream);
  EXPECT_EQ(ours.live_bytes, kActivation);
  EXPECT_EQ(theirs.live_bytes, 2 * kActivation);
  EXPECT_LT(ours.peak_bytes, theirs.peak_bytes);
}

TEST(BiasGelu, UnderAutocastTakesTheBiasInTheDtypeOfX) {
  Inputs inputs({4, 8}, torch::kBFloat16);
  const Tensor bias = inputs.bias.detach().to(torch::kFloat).requires_grad_();
  Tensor y;
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    y = bias_gelu(inputs.x, bias);
  }
  y.backward(inputs.upstream);
  EXPECT_TRUE(same_bits(y, composed(inputs.x, inputs.bias)));
  EXPECT_EQ(bias.grad().scalar_type(), torch::kFloat);
  EXPECT_TRUE(same_bits(bias.grad(), inputs.run(composed)[2].to(torch::kFloat)));
}

TEST(BiasGelu, RefusesWhatDoesNotFitAndNamesIt) {
  const Tensor x = torch::ones({2, 3});
  const auto error = [](const Tensor& a, const Tensor& b) { return error_of<ConfigError>([&] { bias_gelu(a, b); }); };
  EXPECT_THAT(error(x, torch::ones({2})), AllOf(HasSubstr("bias_gelu: x is Float [2, 3]"), HasSubstr("Float [2] on")));
  EXPECT_THAT(error(x, torch::ones({1, 3})), HasSubstr("Float [1, 3]"));
  EXPECT_THAT(error(torch::ones({}), torch::ones({1})), HasSubstr("[..., columns]"));
  EXPECT_THAT(error(x, torch::ones({3}, torch::kHalf)), AllOf(HasSubstr("Half [3]"), HasSubstr("one dtype")));
  EXPECT_THAT(error(x, torch::ones({3}, torch::kMeta)), AllOf(HasSubstr("meta"), HasSubstr("one device")));
  EXPECT_THAT(error(torch::ones({2, 3}, torch::kLong), {}), HasSubstr("Long [2, 3]"));
  EXPECT_THAT(error({}, {}), HasSubstr("x is undefined"));
}

// On a GPU, against FP64 on the CPU. A gradient may be off by rounding to the dtype, and by FP32's error at the
// derivative's root.
class BiasGeluOnCuda : public ::testing::TestWithParam<c10::ScalarType> {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, BiasGeluOnCuda, ::testing::Values(torch::kFloat, torch::kHalf, torch::kBFloat16),
                         [](const auto& tested) { return c10::toString(tested.param); });

TEST_P(BiasGeluOnCuda, IsTheExactResultRoundedWhateverTheShape) {
  const double eps = GetParam() == torch::kFloat ? 1e-6 : GetParam() == torch::kHalf ? 0x1p-11 : 0x1p-8;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{7}, {5, 1}, {33, 70}, {1000, 8}, {3, 5, 4096}, {70000, 24}, {0, 8}}) {
    SCOPED_TRACE(::testing::PrintToString(shape));
    Inputs inputs(shape, GetParam(), torch::kCUDA);
    Inputs exact(shape, torch::kDouble);
    exact.x = inputs.x.detach().to(torch::kCPU, torch::kDouble).requires_grad_();
    exact.bias = inputs.bias.detach().to(torch::kCPU, torch::kDouble).requires_grad_();
    exact.upstream = inputs.upstream.to(torch::kCPU, torch::kDouble);
    for (const bool with_bias : {true, false}) {
      const auto ours = inputs.run(bias_gelu, with_bias);
      const auto expected = exact.run(composed, with_bias);
      for (size_t i = 0; i < 2; ++i) {
        const Tensor result = ours[i].to(torch::kCPU, torch::kDouble);
        EXPECT_TRUE(torch::allclose(result, expected[i], 1.01 * eps, 1e-5)) << (i == 0 ? "value" : "gradient");
      }
      if (with_bias) {
        EXPECT_TRUE(same_bits(ours[2], ours[1].sum_to_size(inputs.bias.sizes())));
      }
    }
  }
}

TEST_P(BiasGeluOnCuda, TakesUnalignedPointersAndGaps) {
  Inputs inputs({64, 65}, GetParam(), torch::kCUDA);
  const auto unaligned = [](const Tensor& x, const Tensor& bias) {
    return bias_gelu(x.flatten().slice(0, 1, 1 + 64 * 64).view({64, 64}), bias.slice(0, 1, 65));
  };
  const auto copied = [](const Tensor& x, const Tensor& bias) {
    return bias_gelu(x.flatten().slice(0, 1, 1 + 64 * 64).view({64, 64}).clone(), bias.slice(0, 1, 65).clone());
  };
  inputs.upstream = inputs.upstream.slice(1, 0, 64);  // with gaps
  EXPECT_TRUE(same_bits(inputs.run(unaligned), inputs.run(copied)));
}

}  // namespace
}  // namespace snug::bias_gelu_test
