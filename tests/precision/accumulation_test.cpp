// Where many numbers become one, FP32 is needed: every operator here is compared with the same in FP64, on every device
// there is.

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/precision.h"
#include "tests/support/tensors.h"

namespace snug::accumulation_test {
namespace {

using testing::close_in_norm;
using torch::kBFloat16;
using torch::kCPU;
using torch::kDouble;
using torch::kHalf;
using torch::Tensor;

double relative_error(double value, double exact) { return std::abs(value - exact) / std::abs(exact); }

/// Products and sums in T throughout.
template <class T>
double dot_in(const Tensor& a, const Tensor& b) {
  const auto x = a.accessor<float, 1>();
  const auto y = b.accessor<float, 1>();
  T sum = 0;
  for (int64_t i = 0; i < a.numel(); ++i) {
    sum = static_cast<T>(sum + static_cast<T>(x[i]) * static_cast<T>(y[i]));
  }
  return static_cast<double>(sum);
}

// Once the sum is 2^11 (FP16) or 2^8 (BF16) times a summand, adding it changes nothing.
TEST(LongDotProduct, SummedIn16BitsStopsGrowingAndInFp32IsExactEnough) {
  torch::manual_seed(0);
  const Tensor a = torch::rand({8192}).to(kBFloat16).to(torch::kFloat);
  const Tensor b = torch::rand({8192}).to(kBFloat16).to(torch::kFloat);
  const double exact = torch::dot(a.to(kDouble), b.to(kDouble)).item<double>();
  EXPECT_GT(relative_error(dot_in<c10::BFloat16>(a, b), exact), 0.5);
  EXPECT_GT(relative_error(dot_in<c10::Half>(a, b), exact), 1e-3);
  EXPECT_LT(relative_error(dot_in<float>(a, b), exact), 1e-5);
}

std::vector<c10::DeviceType> devices() {
  return torch::cuda::is_available() ? std::vector{kCPU, torch::kCUDA} : std::vector{kCPU};
}

double rounding_of(c10::ScalarType dtype) { return std::ldexp(1.0, dtype == kBFloat16 ? -8 : -11); }

// LibTorch's matrix products sum in FP32 also where inputs and output are 16-bit, on CUDA if told so: what is left is
// the rounding of the result.
TEST(LongDotProduct, AsA16BitMatrixProductIsWithinOneRounding) {
  at::globalContext().setAllowFP16ReductionCuBLAS(false);
  at::globalContext().setAllowBF16ReductionCuBLAS(false);
  for (const auto device : devices()) {
    for (const auto dtype : {kBFloat16, kHalf}) {
      torch::manual_seed(0);
      const Tensor a = torch::rand({4, 8192}).to(device, dtype);
      const Tensor b = torch::rand({8192, 4}).to(device, dtype);
      const Tensor exact = torch::mm(a.to(kDouble), b.to(kDouble));
      const Tensor error = ((torch::mm(a, b).to(kDouble) - exact) / exact).abs().max();
      EXPECT_LE(error.item<double>(), 1.01 * rounding_of(dtype)) << dtype << " on " << device;
    }
  }
}

struct Case {
  std::string name;
  std::function<Tensor(const Tensor&)> run;
};

void PrintTo(const Case& operation, std::ostream* out) { *out << operation.name; }

class AccumulatesInFp32 : public ::testing::TestWithParam<Case> {};

TEST_P(AccumulatesInFp32, WithinFp32RoundingOfFp64UnderAutocast) {
  for (const auto device : devices()) {
    for (const auto dtype : {kBFloat16, kHalf}) {
      torch::manual_seed(0);
      const Tensor x = torch::randn({8, 32, 32}).to(device, dtype);
      const Tensor exact = GetParam().run(x.to(kDouble));
      const Autocast autocast(device, dtype, {.fp32_reductions = true});
      const Tensor found = GetParam().run(x);
      // CUDA's list is LibTorch's. Some of these are not in it, and give 16 bits.
      EXPECT_TRUE(found.scalar_type() == torch::kFloat || device == torch::kCUDA);
      const double bound = device == torch::kCUDA ? 3 * rounding_of(dtype) : 1e-6;
      EXPECT_TRUE(close_in_norm(found, exact, bound)) << dtype << " on " << device;
    }
  }
}

// Without it, FP32 numbers are summed in FP32; 16-bit ones as well, but what each operator gives is rounded: some of
// these take three.
TEST_P(AccumulatesInFp32, WithinTheRoundingsOfItsResultsOfFp64WithoutAutocast) {
  for (const auto device : devices()) {
    for (const auto dtype : {torch::kFloat, kBFloat16, kHalf}) {
      torch::manual_seed(0);
      const Tensor x = torch::randn({8, 32, 32}).to(device, dtype);
      const Tensor exact = GetParam().run(x.to(kDouble));
      const Tensor found = GetParam().run(x);
      EXPECT_EQ(found.scalar_type(), dtype);
      const double bound = dtype == torch::kFloat ? 1e-6 : 3 * rounding_of(dtype);
      EXPECT_TRUE(close_in_norm(found, exact, bound)) << dtype << " on " << device;
    }
  }
}

Tensor classes(const Tensor& x) { return torch::arange(8 * 32).remainder(32).to(x.device()); }
Tensor flat(const Tensor& x) { return x.reshape({8 * 32, 32}); }
Tensor like(const Tensor& x) { return torch::full_like(x, 0.25); }

INSTANTIATE_TEST_SUITE_P(
    Losses, AccumulatesInFp32,
    ::testing::Values(
        Case{"cross_entropy", [](const Tensor& x) { return torch::cross_entropy_loss(flat(x), classes(x)); }},
        Case{"nll", [](const Tensor& x) { return torch::nll_loss(torch::log_softmax(flat(x), 1), classes(x)); }},
        Case{"mse", [](const Tensor& x) { return torch::mse_loss(x, like(x)); }},
        Case{"l1", [](const Tensor& x) { return torch::l1_loss(x, like(x)); }},
        Case{"smooth_l1", [](const Tensor& x) { return torch::smooth_l1_loss(x, like(x)); }},
        Case{"huber", [](const Tensor& x) { return torch::huber_loss(x, like(x)); }},
        Case{"bce_with_logits", [](const Tensor& x) { return torch::binary_cross_entropy_with_logits(x, like(x)); }},
        Case{"kl_div", [](const Tensor& x) { return torch::kl_div(torch::log_softmax(x, 2), like(x)); }}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Reductions, AccumulatesInFp32,
    ::testing::Values(Case{"softmax", [](const Tensor& x) { return torch::softmax(x, 2); }},
                      Case{"log_softmax", [](const Tensor& x) { return torch::log_softmax(x, 2); }},
                      Case{"layer_norm", [](const Tensor& x) { return torch::layer_norm(x, {32}); }},
                      Case{"group_norm", [](const Tensor& x) { return torch::group_norm(x, 4); }},
                      Case{
                          "batch_norm",
                          [](const Tensor& x) { return torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false); }},
                      Case{"rms_norm", [](const Tensor& x) { return at::rms_norm(x, {32}, {}, 1e-6); }},
                      Case{"sum_of_squares", [](const Tensor& x) { return (x.pow(2)).sum(); }},
                      Case{"sum", [](const Tensor& x) { return x.abs().sum(); }},
                      Case{"mean", [](const Tensor& x) { return x.abs().mean(); }},
                      Case{"norm", [](const Tensor& x) { return x.norm(); }},
                      Case{"logsumexp", [](const Tensor& x) { return x.logsumexp(2); }}),
    [](const auto& test) { return test.param.name; });

// Why: the same without the option.
TEST(AccumulationWithoutFp32Reductions, IsOffByTheRoundingOf16Bits) {
  torch::manual_seed(0);
  const Tensor x = torch::randn({8, 32, 32}).to(kBFloat16);
  const auto softmax = [](const Tensor& t) { return torch::softmax(t, 2); };
  const auto norm = [](const Tensor& t) { return torch::layer_norm(t, {32}); };
  const Autocast autocast(kCPU, kBFloat16);
  for (const std::function<Tensor(const Tensor&)>& run : {std::function(softmax), std::function(norm)}) {
    EXPECT_FALSE(close_in_norm(run(x), run(x.to(kDouble)), 1e-3));
    EXPECT_TRUE(close_in_norm(run(x), run(x.to(kDouble)), 1e-2));
  }
}

}  // namespace
}  // namespace snug::accumulation_test
