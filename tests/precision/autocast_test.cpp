#include "snug/autocast.h"

#include <limits>
#include <stdexcept>
#include <thread>
#include <tuple>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "tests/support/tensors.h"

namespace snug::autocast_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::kBFloat16;
using torch::kCPU;
using torch::kHalf;
using torch::Tensor;

auto state() {
  return std::make_tuple(at::autocast::is_autocast_enabled(kCPU), at::autocast::get_autocast_dtype(kCPU),
                         at::autocast::is_autocast_cache_enabled());
}

c10::ScalarType product_type() {
  const Tensor a = torch::ones({2, 2});
  return torch::matmul(a, a).scalar_type();
}

TEST(Autocast, ComputesProductsInTheTypeAndEndsWithItsScope) {
  {
    const Autocast autocast(kCPU, kBFloat16);
    EXPECT_EQ(product_type(), kBFloat16);
  }
  EXPECT_EQ(product_type(), torch::kFloat);
}

TEST(Autocast, RestoresTheStateItFound) {
  const auto before = state();
  {
    const Autocast outer(kCPU, kHalf, {.cache = false});
    EXPECT_EQ(state(), std::make_tuple(true, kHalf, false));
    {
      const Autocast inner(kCPU, kBFloat16);
      EXPECT_EQ(state(), std::make_tuple(true, kBFloat16, true));
    }
    EXPECT_EQ(state(), std::make_tuple(true, kHalf, false));
  }
  EXPECT_EQ(state(), before);
}

TEST(Autocast, RestoresTheStateAfterAnException) {
  const auto before = state();
  try {
    const Autocast autocast(kCPU, kBFloat16);
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(state(), before);
  EXPECT_EQ(product_type(), torch::kFloat);
}

TEST(Autocast, DisabledInsideComputesInTheInputsTypeAndGoesOnAfterwards) {
  const Autocast outer(kCPU, kBFloat16);
  {
    const Autocast off(kCPU, kBFloat16, {.enabled = false});
    EXPECT_EQ(product_type(), torch::kFloat);
  }
  EXPECT_EQ(product_type(), kBFloat16);
}

TEST(Autocast, BelongsToItsThread) {
  const Autocast autocast(kCPU, kBFloat16);
  c10::ScalarType elsewhere = kBFloat16;
  std::thread([&] { elsewhere = product_type(); }).join();
  EXPECT_EQ(elsewhere, torch::kFloat);
}

TEST(Autocast, RefusesTypesAndDevicesItCannotCastTo) {
  const auto before = state();
  EXPECT_THAT(error_of<ConfigError>([] { const Autocast autocast(kCPU, torch::kFloat); }),
              HasSubstr("Float is not a type to cast to"));
  EXPECT_THAT(error_of<ConfigError>([] { const Autocast autocast(kCPU, torch::kInt); }), HasSubstr("Int"));
  EXPECT_THAT(error_of<ConfigError>([] { const Autocast autocast(torch::kMeta, kBFloat16); }), HasSubstr("meta"));
  EXPECT_EQ(state(), before);
}

// Whether or not there is such a device here: the switches are the thread's.
TEST(Autocast, SetsAndRestoresTheStateOfEveryDeviceTypeThatLibTorchHasAutocastFor) {
  int types = 0;
  for (int i = 0; i < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++i) {
    const auto type = static_cast<c10::DeviceType>(i);
    if (!at::autocast::is_autocast_available(type)) {
      continue;
    }
    ++types;
    const bool enabled = at::autocast::is_autocast_enabled(type);
    const auto dtype = at::autocast::get_autocast_dtype(type);
    for (const auto low : {kBFloat16, kHalf}) {
      const Autocast autocast(type, low);
      EXPECT_TRUE(at::autocast::is_autocast_enabled(type)) << type;
      EXPECT_EQ(at::autocast::get_autocast_dtype(type), low) << type;
    }
    EXPECT_EQ(at::autocast::is_autocast_enabled(type), enabled) << type;
    EXPECT_EQ(at::autocast::get_autocast_dtype(type), dtype) << type;
  }
  EXPECT_GE(types, 3) << "the CPU, CUDA and others";
}

// LibTorch keeps the cast of a weight under the weight's identity. After a write, the old cast is the wrong one.
struct Weight {
  Tensor weight = torch::ones({4, 4}, torch::requires_grad());
  Tensor x = torch::ones({1, 4});

  float product() const { return torch::matmul(x, weight)[0][0].item<float>(); }
  void add_one() {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
};

TEST(AutocastCache, IsEmptyInTheNextRegion) {
  Weight w;
  for (const float expected : {4.0f, 8.0f, 12.0f}) {
    {
      const Autocast autocast(kCPU, kBFloat16);
      EXPECT_EQ(w.product(), expected);
    }
    w.add_one();
  }
}

TEST(AutocastCache, IsEmptyAfterARegionThatThrew) {
  Weight w;
  try {
    const Autocast autocast(kCPU, kBFloat16);
    w.product();
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  w.add_one();
  const Autocast autocast(kCPU, kBFloat16);
  EXPECT_EQ(w.product(), 8.0f);
}

TEST(AutocastCache, IsEmptiedByClearAutocastCache) {
  Weight w;
  const Autocast autocast(kCPU, kBFloat16);
  EXPECT_EQ(w.product(), 4.0f);
  w.add_one();
  EXPECT_EQ(w.product(), 4.0f) << "LibTorch no longer gives the stale cast: is clearing still needed?";
  Autocast::clear_cache();
  EXPECT_EQ(w.product(), 8.0f);
}

TEST(AutocastCache, IsNotUsedWhereItIsOff) {
  Weight w;
  const Autocast autocast(kCPU, kBFloat16, {.cache = false});
  EXPECT_EQ(w.product(), 4.0f);
  w.add_one();
  EXPECT_EQ(w.product(), 8.0f);
}

TEST(AutocastCache, IsEmptiedByAStepOfOurOptimizerInsideTheRegion) {
  Weight w;
  AdamW optimizer({w.weight},
                  {.lr = 1.0, .eps = 0, .weight_decay = 0});  // the first step is lr times the gradient's sign
  const Autocast autocast(kCPU, kBFloat16);
  EXPECT_EQ(w.product(), 4.0f);
  w.weight.mutable_grad() = torch::full({4, 4}, -1.0);
  optimizer.step();
  EXPECT_FLOAT_EQ(w.weight[0][0].item<float>(), 2.0f);
  EXPECT_EQ(w.product(), 8.0f);
}

TEST(AutocastCache, IsKeptFromAnInnerRegionToTheOuterAndThenEmptied) {
  Weight w;
  {
    const Autocast outer(kCPU, kBFloat16);
    {
      const Autocast inner(kCPU, kBFloat16);
      EXPECT_EQ(w.product(), 4.0f);
    }
    w.add_one();
    EXPECT_EQ(w.product(), 4.0f) << "only the outermost region empties it; writing by hand needs Autocast::clear_cache";
  }
  const Autocast next(kCPU, kBFloat16);
  EXPECT_EQ(w.product(), 8.0f);
}

// What the guard saves users from: the switches alone, as a port from Python would set them.
TEST(AutocastCache, WouldBeStaleWithLibTorchsSwitchesAlone) {
  Weight w;
  const auto region = [&] {
    at::autocast::set_autocast_enabled(kCPU, true);
    const float product = w.product();
    at::autocast::set_autocast_enabled(kCPU, false);
    return product;
  };
  EXPECT_EQ(region(), 4.0f);
  w.add_one();
  EXPECT_EQ(region(), 4.0f) << "LibTorch no longer gives the stale cast: is the guard still needed?";
  at::autocast::clear_cache();
  EXPECT_EQ(region(), 8.0f);
  at::autocast::clear_cache();
}

TEST(AutocastCache, WouldBeStaleAfterAStepOfAnOptimizerThatDoesNotClearIt) {
  Weight w;
  torch::optim::SGD optimizer(std::vector{w.weight}, torch::optim::SGDOptions(1.0));
  const Autocast autocast(kCPU, kBFloat16);
  EXPECT_EQ(w.product(), 4.0f);
  w.weight.mutable_grad() = torch::full({4, 4}, -1.0);
  optimizer.step();
  EXPECT_EQ(w.product(), 4.0f) << "LibTorch no longer gives the stale cast: need AdamW clear the cache?";
}

// A cast made where gradients are off has no history: a later use of it must not lose the weight's gradient
// (pytorch/pytorch#112583).
TEST(AutocastCache, AWeightFirstUsedWithoutGradientsStillGetsItsGradient) {
  Weight w;
  const Autocast autocast(kCPU, kBFloat16);
  {
    const torch::NoGradGuard no_grad;
    w.product();
  }
  torch::matmul(w.x, w.weight).sum().backward();
  ASSERT_TRUE(w.weight.grad().defined());
  EXPECT_TRUE(torch::equal(w.weight.grad(), torch::ones({4, 4})));
}

TEST(AutocastCache, AWeightFirstUsedInInferenceModeStillGetsItsGradient) {
  Weight w;
  const Autocast autocast(kCPU, kBFloat16);
  {
    const c10::InferenceMode inference;
    w.product();
  }
  torch::matmul(w.x, w.weight).sum().backward();
  ASSERT_TRUE(w.weight.grad().defined());
  EXPECT_TRUE(torch::equal(w.weight.grad(), torch::ones({4, 4})));
}

// LibTorch casts weights with their history wherever it is, so that a kept cast serves in every mode.
TEST(AutocastCache, CastsInNestedGradientModesNeitherLoseNorInventGradients) {
  Weight w;
  const Autocast autocast(kCPU, kBFloat16);
  const auto product = [&] { return torch::matmul(w.x, w.weight); };
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(product().requires_grad());
    {
      const torch::AutoGradMode enabled(true);
      product().sum().backward();
      EXPECT_TRUE(torch::equal(w.weight.grad(), torch::ones({4, 4})));
    }
    EXPECT_FALSE(product().requires_grad());
    w.add_one();
    Autocast::clear_cache();
    product();
  }
  const Tensor y = product();
  EXPECT_EQ(y[0][0].item<float>(), 8.0f);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(w.weight.grad(), torch::full({4, 4}, 2.0)));
}

TEST(CheckAutocastCache, FindsTheWeightThatWasWrittenToAfterItsCast) {
  Weight fresh;
  Weight written;
  const Autocast autocast(kCPU, kBFloat16);
  fresh.product();
  written.product();
  const std::vector<Tensor> weights{Tensor(), fresh.weight, written.weight};
  EXPECT_NO_THROW(Autocast::check_cache(weights));
  written.add_one();
  EXPECT_THAT(error_of<Error>([&] { Autocast::check_cache(weights); }),
              ::testing::AllOf(HasSubstr("weight 2 [4, 4]"), HasSubstr("Autocast::clear_cache")));
  Autocast::clear_cache();
  EXPECT_NO_THROW(Autocast::check_cache(weights));
  EXPECT_EQ(written.product(), 8.0f);
}

TEST(CheckAutocastCache, TakesNanForWhatItIs) {
  Weight w;
  {
    const torch::NoGradGuard no_grad;
    w.weight.fill_(std::numeric_limits<float>::quiet_NaN());
  }
  const Autocast autocast(kCPU, kBFloat16);
  w.product();
  EXPECT_NO_THROW(Autocast::check_cache({w.weight}));
}

TEST(CheckAutocastCache, LeavesGradientsAsTheyWouldBe) {
  Weight w;
  const Autocast autocast(kCPU, kBFloat16);
  Autocast::check_cache({w.weight});
  torch::matmul(w.x, w.weight).sum().backward();
  EXPECT_TRUE(torch::equal(w.weight.grad(), torch::ones({4, 4})));
}

TEST(CheckAutocastCache, HasNothingToSayWhereNothingIsCastOrKept) {
  Weight w;
  const Tensor integers = torch::ones({2}, torch::kLong);
  const Tensor low = torch::ones({2}, kBFloat16);
  EXPECT_NO_THROW(Autocast::check_cache({w.weight}));
  {
    const Autocast uncached(kCPU, kBFloat16, {.cache = false});
    w.product();
    w.add_one();
    EXPECT_NO_THROW(Autocast::check_cache({w.weight}));
  }
  const Autocast autocast(kCPU, kBFloat16);
  EXPECT_NO_THROW(Autocast::check_cache({integers, low, torch::ones({2}, torch::kDouble)}));
}

}  // namespace
}  // namespace snug::autocast_test
