// Rounding against torch's casts. Torch casts double to 16 and 8 bits through float, so those are compared on floats.

#include <cmath>
#include <cstdint>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/float_format.h"

namespace snug::cli::float_format_casts_test {
namespace {

using torch::Tensor;

struct Cast {
  FloatFormat format;
  torch::ScalarType type;
  torch::ScalarType same_size;  // an integer type
};

void PrintTo(const Cast& cast, std::ostream* out) { *out << cast.format.name; }

class TorchCast : public ::testing::TestWithParam<Cast> {};
INSTANTIATE_TEST_SUITE_P(All, TorchCast,
                         ::testing::Values(Cast{kBf16, torch::kBFloat16, torch::kInt16},
                                           Cast{kFp16, torch::kHalf, torch::kInt16},
                                           Cast{kFp8E4m3, torch::kFloat8_e4m3fn, torch::kUInt8},
                                           Cast{kFp8E5m2, torch::kFloat8_e5m2, torch::kUInt8}),
                         [](const auto& tested) {
                           std::string name(tested.param.format.name);
                           std::erase(name, ' ');
                           return name;
                         });

int64_t packed(const FloatFormat& format, const FloatBits& bits) {
  return (((bits.sign << format.exponent_bits) | bits.exponent) << format.fraction_bits) | bits.fraction;
}

// Compares value and bits of each number with what torch made of it; of a NaN only that it is one.
void expect_same(const FloatFormat& format, const Tensor& numbers, const Tensor& cast, const Tensor& patterns) {
  const Tensor x = numbers.to(torch::kDouble).contiguous();
  const Tensor values = cast.to(torch::kFloat).to(torch::kDouble).contiguous();
  const int64_t mask = (int64_t{1} << format.bits()) - 1;
  const Tensor bits = patterns.to(torch::kInt64).bitwise_and(mask).contiguous();
  for (int64_t i = 0; i < x.numel(); ++i) {
    const auto rounded = round_to(format, x.const_data_ptr<double>()[i]);
    const double expected = values.const_data_ptr<double>()[i];
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(rounded.value)) << x[i];
      continue;
    }
    ASSERT_EQ(rounded.value, expected) << x[i];
    ASSERT_EQ(packed(format, rounded.bits), bits.const_data_ptr<int64_t>()[i]) << x[i];
  }
}

Tensor all_patterns(const Cast& cast) {
  return torch::arange(int64_t{1} << cast.format.bits(), torch::kInt64).to(cast.same_size);
}

// LibTorch did so from 2.13 on.
bool saturates_as_we_do(const Cast& cast) {
  return cast.format.has_infinity || !torch::full({1}, 1e6).to(cast.type).to(torch::kFloat).isnan().item<bool>();
}

TEST_P(TorchCast, AgreesOnEveryBitPattern) {
  const Cast& cast = GetParam();
  const Tensor patterns = all_patterns(cast);
  const Tensor numbers = patterns.view(cast.type);
  expect_same(cast.format, numbers.to(torch::kFloat), numbers, patterns);
}

TEST_P(TorchCast, AgreesOnTheMiddleOfAnyTwoNeighboursAndBesideIt) {
  const Cast& cast = GetParam();
  Tensor numbers = all_patterns(cast).view(cast.type).to(torch::kFloat);
  numbers = std::get<0>(numbers.masked_select(numbers.isfinite()).sort());
  // Half of each first: the sum of the two largest of BF16 would overflow.
  const Tensor middle = numbers.slice(0, 1) / 2 + numbers.slice(0, 0, -1) / 2;
  for (const Tensor& x :
       {middle, middle.nextafter(torch::full({}, INFINITY)), middle.nextafter(torch::full({}, -INFINITY))}) {
    const Tensor rounded = x.to(cast.type);
    expect_same(cast.format, x, rounded, rounded.view(cast.same_size));
  }
}

TEST_P(TorchCast, AgreesOnFloatsOfAllSizes) {
  const Cast& cast = GetParam();
  if (!saturates_as_we_do(cast)) {
    GTEST_SKIP() << "this LibTorch gives NaN beyond the largest number of " << cast.format.name;
  }
  torch::manual_seed(1);
  // Random bits: every exponent occurs, with zero, subnormals, infinities and NaN.
  const Tensor bits = torch::randint(-(int64_t{1} << 31), int64_t{1} << 31, {200'000}, torch::kInt64).to(torch::kInt32);
  const Tensor wide = bits.view(torch::kFloat);
  const Tensor near = torch::randn({200'000}) * torch::exp2(torch::empty({200'000}).uniform_(-30, 20));
  for (const Tensor& x : {wide, near}) {
    const Tensor rounded = x.to(cast.type);
    expect_same(cast.format, x, rounded, rounded.view(cast.same_size));
  }
}

TEST_P(TorchCast, AgreesOnWhereOverflowBegins) {
  const Cast& cast = GetParam();
  if (!saturates_as_we_do(cast)) {
    GTEST_SKIP() << "this LibTorch gives NaN beyond the largest number of " << cast.format.name;
  }
  const double step = std::ldexp(cast.format.epsilon(), cast.format.max_exponent());
  const auto limit = static_cast<float>(cast.format.max() + step / 2);
  const Tensor x =
      torch::tensor({limit, std::nextafter(limit, 0.0F), std::nextafter(limit, INFINITY), -limit, INFINITY, -INFINITY});
  const Tensor rounded = x.to(cast.type);
  expect_same(cast.format, x, rounded, rounded.view(cast.same_size));
}

TEST(TorchCastToFloat, AgreesOnDoublesOfAllSizes) {
  torch::manual_seed(1);
  const auto options = torch::TensorOptions(torch::kDouble);
  const Tensor exponents = torch::empty({500'000}, options).uniform_(-155, 130);
  const Tensor x = torch::randn({500'000}, options) * torch::exp2(exponents);
  const Tensor rounded = x.to(torch::kFloat);
  expect_same(kFp32, x, rounded, rounded.view(torch::kInt32));
}

// The example of PyTorch's own float formats: what Half prints of it.
TEST(TorchCast, TheWellKnownExampleIsWhatHalfMakesOfIt) {
  const Tensor half = torch::tensor(0.00006666666F).to(torch::kHalf);
  EXPECT_EQ(round_to(kFp16, 0.00006666666).value, half.item<double>());
}

}  // namespace
}  // namespace snug::cli::float_format_casts_test
