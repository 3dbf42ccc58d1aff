#include "snug/precision/precision.h"

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/precision/autocast.h"
#include "snug/precision/detail/matmul_speed.h"
#include "tests/support/tensors.h"

namespace snug {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

constexpr Precision kAll[] = {Precision::Float32, Precision::BFloat16, Precision::Float16, Precision::Auto};

TEST(Precision, HasANameThatLeadsBackToIt) {
  for (const Precision precision : kAll) {
    EXPECT_EQ(precision_from_string(to_string(precision)), precision);
  }
  EXPECT_EQ(to_string(Precision::BFloat16), "bfloat16");
}

TEST(Precision, AnUnknownNameIsAnErrorThatListsTheKnownOnes) {
  for (const char* name : {"", "fp32", "BFloat16", "float64"}) {
    EXPECT_THAT(error_of<ConfigError>([&] { precision_from_string(name); }),
                AllOf(HasSubstr("'" + std::string(name) + "'"), HasSubstr("float32, bfloat16, float16 or auto")));
  }
}

TEST(Precision, NamesTheTypeToComputeInExceptForAuto) {
  EXPECT_EQ(compute_dtype(Precision::Float32), torch::kFloat);
  EXPECT_EQ(compute_dtype(Precision::BFloat16), torch::kBFloat16);
  EXPECT_EQ(compute_dtype(Precision::Float16), torch::kHalf);
  EXPECT_THAT(error_of<ConfigError>([] { compute_dtype(Precision::Auto); }), HasSubstr("choose_precision"));
}

TEST(ChoosePrecision, TakesBFloat16OnlyWhereItsProductsAreFasterByMoreThanTheCastsCost) {
  for (const auto device : {torch::kCPU, torch::kCUDA}) {
    EXPECT_EQ(choose_precision({.float32 = 100, .bfloat16 = 400}, device), Precision::BFloat16);
    EXPECT_EQ(choose_precision({.float32 = 100, .bfloat16 = 120}, device), Precision::BFloat16);
    EXPECT_EQ(choose_precision({.float32 = 100, .bfloat16 = 119}, device), Precision::Float32);
    EXPECT_EQ(choose_precision({.float32 = 217, .bfloat16 = 50}, device), Precision::Float32);
    EXPECT_EQ(choose_precision({.float32 = 100}, device), Precision::Float32) << "no 16 bits at all";
    EXPECT_EQ(choose_precision({}, device), Precision::Float32) << "nothing is known";
  }
}

TEST(ChoosePrecision, NeverTakesFloat16OnACpuHoweverFast) {
  EXPECT_EQ(choose_precision({.float32 = 100, .bfloat16 = 100, .float16 = 1e6, .float32_small = 1}, torch::kCPU),
            Precision::Float32);
}

TEST(ChoosePrecision, TakesFloat16OnOtherDevicesWhereBFloat16IsMissingOrSlowAndFloat16IsFaster) {
  const auto chosen = [](double bfloat16, double float16) {
    return choose_precision({.float32 = 10, .bfloat16 = bfloat16, .float16 = float16, .float32_small = 8},
                            torch::kCUDA);
  };
  EXPECT_EQ(chosen(0, 60), Precision::Float16) << "the device has no BF16";
  EXPECT_EQ(chosen(3, 60), Precision::Float16) << "it has BF16 in name only";
  EXPECT_EQ(chosen(0, 9.6), Precision::Float16);
  EXPECT_EQ(chosen(0, 9.5), Precision::Float32) << "less than 1.2 times the speed of the same product in FP32";
  EXPECT_EQ(chosen(0, 0), Precision::Float32);
  EXPECT_EQ(chosen(12, 60), Precision::BFloat16) << "it needs no loss scaling";
}

TEST(MeasureMatmulSpeed, GivesAPositiveNumberForEachType) {
  const auto speed = measure_matmul_speed(torch::kCPU);
  EXPECT_GT(speed.float32, 0);
  EXPECT_GT(speed.bfloat16, 0);
  EXPECT_GT(speed.float16, 0);
  EXPECT_GT(speed.float32_small, 0);
}

TEST(MeasureMatmulSpeed, LeavesTheRandomGeneratorAlone) {
  torch::manual_seed(1);
  const auto expected = torch::rand({4});
  torch::manual_seed(1);
  measure_matmul_speed(torch::kCPU);
  EXPECT_TRUE(testing::same_bits(torch::rand({4}), expected));
}

// Under autocast FP32 products would be measured as 16-bit ones.
TEST(MeasureMatmulSpeed, MeasuresEachTypeAsItIsInsideAnAutocastRegion) {
  static std::atomic<int> casts;
  casts = 0;
  const auto callback = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                                if (std::string_view(function.name()) == "aten::_to_copy") {
                                                  ++casts;
                                                }
                                                return std::unique_ptr<at::ObserverContext>();
                                              }).scopes({at::RecordScope::FUNCTION}));
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    const auto a = torch::ones({2, 2});
    torch::mm(a, a);
    EXPECT_EQ(casts, 2) << "the counter counts";
    casts = 0;
    measure_matmul_speed(torch::kCPU);
    EXPECT_EQ(torch::mm(a, a).scalar_type(), torch::kBFloat16) << "autocast goes on afterwards";
  }
  at::removeCallback(callback);
  // item() of a 16-bit number does not copy; the product after the measurement casts twice.
  EXPECT_EQ(casts, 2);
}

TEST(MeasureMatmulSpeed, GivesZeroForATypeThatTheDeviceHasNoProductsOf) {
  EXPECT_EQ(detail::matmul_speed(torch::kCPU, torch::kBool, 8, 1), 0.0);
  EXPECT_GT(detail::matmul_speed(torch::kCPU, torch::kFloat, 8, 1), 0.0);
}

TEST(AccumulateMatmulsInFp32, ForbidsLowPrecisionSumsAndTf32) {
  const MatmulAccumulation before = matmul_accumulation();
  EXPECT_TRUE(before.fp16_reduction && before.bf16_reduction) << "LibTorch's default has changed";
  accumulate_matmuls_in_fp32();
  const MatmulAccumulation now = matmul_accumulation();
  EXPECT_FALSE(now.fp16_reduction || now.bf16_reduction || now.fp16_accumulation || now.tf32);
  EXPECT_FALSE(at::globalContext().allowTF32CuDNN());
  accumulate_matmuls_in_fp32(/*allow_tf32=*/true);
  EXPECT_TRUE(matmul_accumulation().tf32);
  EXPECT_TRUE(at::globalContext().allowTF32CuDNN());
  EXPECT_FALSE(matmul_accumulation().fp16_reduction);
  accumulate_matmuls_in_fp32();
  EXPECT_FALSE(matmul_accumulation().tf32);
}

}  // namespace
}  // namespace snug
