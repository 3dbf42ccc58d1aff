#include "snug/precision.h"

#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "src/precision/matmul_speed.h"
#include "tests/support/tensors.h"

namespace snug::precision_test {
namespace {

using detail::MatmulSpeed;
using detail::measure_matmul_speed;
using detail::precision_for;
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
    EXPECT_EQ(precision_for({.float32 = 100, .bfloat16 = 400}, device), Precision::BFloat16);
    EXPECT_EQ(precision_for({.float32 = 100, .bfloat16 = 120}, device), Precision::BFloat16);
    EXPECT_EQ(precision_for({.float32 = 100, .bfloat16 = 119}, device), Precision::Float32);
    EXPECT_EQ(precision_for({.float32 = 217, .bfloat16 = 50}, device), Precision::Float32);
    EXPECT_EQ(precision_for({.float32 = 100}, device), Precision::Float32) << "no 16 bits at all";
    EXPECT_EQ(precision_for({}, device), Precision::Float32) << "nothing is known";
  }
}

TEST(ChoosePrecision, NeverTakesFloat16OnACpuHoweverFast) {
  EXPECT_EQ(precision_for({.float32 = 100, .bfloat16 = 100, .float16 = 1e6, .float32_small = 1}, torch::kCPU),
            Precision::Float32);
}

TEST(ChoosePrecision, TakesFloat16OnOtherDevicesWhereBFloat16IsMissingOrSlowAndFloat16IsFaster) {
  const auto chosen = [](double bfloat16, double float16) {
    return precision_for({.float32 = 10, .bfloat16 = bfloat16, .float16 = float16, .float32_small = 8}, torch::kCUDA);
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

// A device whose products take what time the test says; a type it does not know is one it does not have.
struct FakeDevice {
  std::map<c10::ScalarType, double> billions;  // floating-point operations a second
  double start = 0;                            // more for the first product of a type and size
  double time = 0, timed = 0;
  int products = 0;
  std::set<std::pair<c10::ScalarType, int64_t>> known;

  MatmulSpeed measure(c10::DeviceType device = torch::kCPU) {
    const auto multiply = [this](c10::ScalarType dtype, int64_t size) {
      TORCH_CHECK(billions.contains(dtype), "not implemented");
      const double seconds = 2e-9 * std::pow(static_cast<double>(size), 3) / billions[dtype];
      time += seconds + (known.insert({dtype, size}).second ? start : 0);
      timed += seconds;
      ++products;
    };
    return detail::measure({multiply, [this] { return time; }}, device);
  }
};

TEST(MeasureMatmulSpeed, GivesTheSpeedOfEachTypeAndZeroForOneThatTheDeviceDoesNotHave) {
  FakeDevice device{.billions = {{torch::kFloat, 1e4}, {torch::kHalf, 3e4}}};
  const auto speed = device.measure(torch::kCUDA);
  EXPECT_NEAR(speed.float32, 1e4, 1e-4);
  EXPECT_EQ(speed.bfloat16, 0);
  EXPECT_NEAR(speed.float16, 3e4, 1e-4);
  EXPECT_NEAR(speed.float32_small, 1e4, 1e-4);
  EXPECT_THROW(detail::probe_of(torch::kCPU).multiply(torch::kBool, 8), c10::Error);
}

// Libraries load and compile at the first product of a type and size.
TEST(MeasureMatmulSpeed, IsTheSameOnAColdStart) {
  FakeDevice warm{.billions = {{torch::kFloat, 100}, {torch::kBFloat16, 400}, {torch::kHalf, 50}}};
  FakeDevice cold = warm;
  cold.start = 10;
  const MatmulSpeed expected = warm.measure(), found = cold.measure();
  EXPECT_NEAR(found.float32, expected.float32, 1e-6);
  EXPECT_NEAR(found.bfloat16, 400, 1e-4);
  EXPECT_NEAR(found.float16, expected.float16, 1e-6);
  EXPECT_EQ(precision_for(found, torch::kCPU), Precision::BFloat16);
}

TEST(MeasureMatmulSpeed, SpendsNoMoreThanATenthOfASecondHoweverSlowTheDevice) {
  for (const double float32 : {0.05, 0.5, 5.0, 8.0, 50.0, 500.0}) {
    for (const double low : {0.04, 0.25, 1.0, 7.6, 1000.0}) {
      FakeDevice device{.billions = {{torch::kFloat, float32}, {torch::kBFloat16, low}, {torch::kHalf, low}}};
      const auto speed = device.measure();
      EXPECT_LE(device.timed, 0.1) << float32 << " and " << low;
      EXPECT_LT(device.products, 40);
      EXPECT_NEAR(speed.float32, float32, 1e-6 * float32);
    }
  }
}

// Whoever asks first pays: another measurement may say something else, and one process is to train in one precision.
TEST(MeasuredPrecision, IsMeasuredOncePerDevice) {
  static std::atomic<int> products;
  const Precision first = choose_precision(torch::kCPU);
  products = 0;
  const auto callback = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                                products += std::string_view(function.name()) == "aten::mm";
                                                return std::unique_ptr<at::ObserverContext>();
                                              }).scopes({at::RecordScope::FUNCTION}));
  measure_matmul_speed(torch::kCPU);
  EXPECT_GT(products, 0) << "the counter counts";
  products = 0;
  EXPECT_EQ(choose_precision(torch::kCPU), first);
  at::removeCallback(callback);
  EXPECT_EQ(products, 0);
}

}  // namespace
}  // namespace snug::precision_test
