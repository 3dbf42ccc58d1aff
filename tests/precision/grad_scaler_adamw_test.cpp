#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

// GradScaler with an optimizer that unscales and skips in its own pass over the parameters.

namespace snug::grad_scaler_adamw_test {
namespace {

using testing::clones_of;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// A scaler that has scaled once already, as after the first loss.
GradScaler warm(GradScalerOptions options = {}) {
  GradScaler scaler(options);
  scaler.scale(torch::ones({}));
  return scaler;
}

struct AdamWTrained {
  std::vector<Tensor> parameters = testing::random_parameters();
  AdamW optimizer{parameters, {.lr = 0.1, .weight_decay = 0.1}};

  void set_gradients(uint64_t seed, double factor) { testing::set_gradients(parameters, seed, factor); }
  std::vector<Tensor> everything() const {
    auto tensors = clones_of(parameters);
    const auto state = testing::tensors_in(optimizer.state_dict());
    tensors.insert(tensors.end(), state.begin(), state.end());
    return tensors;
  }
};

TEST(GradScalerWithAdamW, GivesTheVeryBitsOfUnscaledTraining) {
  AdamWTrained plain, fused, unscaled_before;
  GradScaler scaler = warm({.init_scale = 1024, .growth_interval = 2});
  GradScaler other = warm({.init_scale = 1024, .growth_interval = 2});
  for (uint64_t step = 1; step <= 5; ++step) {
    plain.set_gradients(step, 1);
    plain.optimizer.step();
    fused.set_gradients(step, scaler.get_scale());
    EXPECT_TRUE(scaler.step(fused.optimizer));
    scaler.update();
    unscaled_before.set_gradients(step, other.get_scale());
    other.unscale_(unscaled_before.optimizer);
    EXPECT_TRUE(other.step(unscaled_before.optimizer));
    other.update();
    EXPECT_TRUE(same_bits(fused.everything(), plain.everything())) << step;
    EXPECT_TRUE(same_bits(unscaled_before.everything(), plain.everything())) << step;
    EXPECT_TRUE(same_bits(testing::gradients_of(fused.parameters), testing::gradients_of(plain.parameters)))
        << "gradients read unscaled after the step";
  }
  EXPECT_EQ(scaler.get_scale(), 4096.0);
}

TEST(GradScalerWithAdamW, UnscaleClipStepEqualsClippingUnscaledGradients) {
  AdamWTrained plain, scaled;
  GradScaler scaler = warm();
  for (uint64_t step = 1; step <= 3; ++step) {
    plain.set_gradients(step, 1);
    clip_grad_norm_(plain.parameters, 0.5);
    plain.optimizer.step();
    scaled.set_gradients(step, scaler.get_scale());
    scaler.unscale_(scaled.optimizer);
    clip_grad_norm_(scaled.parameters, 0.5);
    EXPECT_TRUE(scaler.step(scaled.optimizer));
    scaler.update();
    EXPECT_TRUE(same_bits(scaled.everything(), plain.everything())) << step;
  }
}

TEST(GradScalerWithAdamW, ASkipLeavesParametersMomentsAndStepCountUntouched) {
  for (const bool unscale_before : {false, true}) {
    for (const bool first_step : {false, true}) {
      AdamWTrained plain, scaled;
      GradScaler scaler = warm();
      const auto good = [&](uint64_t seed) {
        plain.set_gradients(seed, 1);
        plain.optimizer.step();
        scaled.set_gradients(seed, scaler.get_scale());
        EXPECT_TRUE(scaler.step(scaled.optimizer));
        scaler.update();
      };
      if (!first_step) {
        good(1);
        good(2);
      }
      const auto before = scaled.everything();
      scaled.set_gradients(3, scaler.get_scale());
      scaled.parameters[1].mutable_grad()[17] = kNan;
      if (unscale_before) {
        scaler.unscale_(scaled.optimizer);
        clip_grad_norm_(scaled.parameters, 0.5);
      }
      EXPECT_FALSE(scaler.step(scaled.optimizer));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32768.0);
      if (first_step) {
        for (size_t i = 0; i < scaled.parameters.size(); ++i) {
          EXPECT_TRUE(same_bits(scaled.parameters[i], before[i]));
        }
      } else {
        EXPECT_TRUE(same_bits(scaled.everything(), before));
      }
      good(4);
      EXPECT_TRUE(same_bits(scaled.everything(), plain.everything())) << "as if the skipped step had never been";
    }
  }
}

TEST(GradScalerWithAdamW, AScalingHoldsForOneStepOnly) {
  AdamWTrained plain, scaled;
  GradScaler scaler = warm();
  plain.set_gradients(1, 1);
  plain.optimizer.step();
  scaled.set_gradients(1, scaler.get_scale());
  EXPECT_TRUE(scaler.step(scaled.optimizer));
  plain.set_gradients(2, 1);
  plain.optimizer.step();
  scaled.set_gradients(2, 1);
  scaled.optimizer.step();  // without the scaler
  EXPECT_TRUE(same_bits(scaled.everything(), plain.everything()));
}

TEST(GradScalerWithAdamW, MixesWithAnotherKindOfOptimizerUnderOneScale) {
  AdamWTrained a;
  const Tensor b = torch::tensor({1.0f, 2.0f}, torch::requires_grad());
  torch::optim::SGD sgd({b}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = warm();
  const auto before = clones_of(a.parameters);
  a.set_gradients(1, scaler.get_scale());
  a.parameters[0].mutable_grad()[0][0] = kInf;
  b.mutable_grad() = torch::full({2}, 0.5 * scaler.get_scale());
  const GradScaler::Outcome first = scaler.step(a.optimizer);
  const GradScaler::Outcome second = scaler.step(sgd);
  scaler.update();
  EXPECT_FALSE(first) << "an outcome may be read after update()";
  EXPECT_TRUE(second);
  EXPECT_TRUE(same_bits(clones_of(a.parameters), before));
  EXPECT_TRUE(torch::equal(b, torch::tensor({0.5f, 1.5f})));
  EXPECT_EQ(scaler.get_scale(), 32768.0);
}

TEST(GradScalerWithAdamW, Fp16GradientsAreAnErrorAndChangeNothing) {
  for (const bool unscale_before : {false, true}) {
    AdamWTrained t;
    GradScaler scaler = warm();
    t.set_gradients(1, scaler.get_scale());
    t.parameters[1].mutable_grad() = torch::ones({64}, torch::kHalf);
    const auto before = t.everything();
    EXPECT_THAT(error_of<ConfigError>([&] {
                  if (unscale_before) {
                    scaler.unscale_(t.optimizer);
                  }
                  scaler.step(t.optimizer);
                }),
                HasSubstr("gradient of parameter 1"));
    EXPECT_TRUE(same_bits(t.everything(), before));
  }
}

TEST(GradScalerWithAdamW, WhicheverAllocationOfAStepFailsAllIsOldAndTheStepCanBeMadeAgain) {
  AdamWTrained plain;
  plain.set_gradients(1, 1);
  plain.optimizer.step();
  AdamWTrained t;
  GradScaler scaler = warm();
  t.set_gradients(1, scaler.get_scale());
  const auto before = t.everything();
  const auto gradients = testing::gradients_of(t.parameters);
  const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
    if (allocation.stops([&] { scaler.step(t.optimizer); })) {
      ASSERT_TRUE(same_bits(t.everything(), before));
      ASSERT_TRUE(same_bits(testing::gradients_of(t.parameters), gradients));
    }
  });
  EXPECT_GE(failures, 10);
  scaler.update();
  EXPECT_TRUE(same_bits(t.everything(), plain.everything()));
}

}  // namespace
}  // namespace snug::grad_scaler_adamw_test
