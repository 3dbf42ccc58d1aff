#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "tests/step/adamw_training.h"

// The precision of a step, and the scale of its loss.

namespace snug::stepper_precision_test {
namespace {

using testing::AdamWTraining;
using testing::error_of;
using ::testing::HasSubstr;
using testing::regression_batch;
using testing::same_bits;
using torch::Tensor;

// --- the scale

TEST(StepperScaling, ASkippedStepLeavesTheOptimizerUntouchedAndTheResultSaysSo) {
  const Batch batch = regression_batch(4);
  AdamWTraining run({.precision = Precision::Float16, .clip_norm = 1.0, .sixteen_bit = {.scaler = {.init_scale = 64}}});
  const auto first = run.step(batch);
  EXPECT_TRUE(first.stepped());
  EXPECT_EQ(first.scale(), 64.0);
  const auto before = run.state();
  const auto result = run.stepper.step(batch, [&](const Batch& micro) {
    const Loss loss = run.loss_of(micro);
    return Loss::sum(loss.value() * std::numeric_limits<float>::infinity(), loss.count());
  });
  EXPECT_FALSE(result.stepped());
  EXPECT_FALSE(std::isfinite(result.grad_norm()));
  EXPECT_EQ(result.scale(), 64.0) << "the scale that this step used";
  EXPECT_EQ(run.stepper.scaler().get_scale(), 32.0);
  EXPECT_TRUE(same_bits(run.state(), before));
}

TEST(StepperScaling, IsOffIfAskedAndForOtherPrecisions) {
  EXPECT_FALSE(AdamWTraining({.precision = Precision::BFloat16}).stepper.scaler().is_enabled());
  EXPECT_FALSE(AdamWTraining().stepper.scaler().is_enabled());
  EXPECT_FALSE(AdamWTraining({.precision = Precision::Float16, .sixteen_bit = {.scaler = {.enabled = false}}})
                   .stepper.scaler()
                   .is_enabled());
  EXPECT_EQ(AdamWTraining({.precision = Precision::BFloat16}).step(regression_batch(4)).scale(), 1.0);
  EXPECT_TRUE(AdamWTraining({.precision = Precision::Float16}).stepper.scaler().is_enabled());
}

TEST(StepperScaling, ByPowersOfTwoDoesNotChangeFloat32Mathematics) {
  // FP16 autocast on tiny sizes, once with a scale of 1 and once of 64: no gradient here leaves FP16's normal range.
  const Batch batch = regression_batch(4);
  AdamWTraining one({.precision = Precision::Float16, .sixteen_bit = {.scaler = {.init_scale = 1}}});
  AdamWTraining many({.precision = Precision::Float16, .sixteen_bit = {.scaler = {.init_scale = 64}}});
  one.step(batch);
  const auto result = many.step(batch);
  EXPECT_EQ(result.scale(), 64.0);
  for (size_t i = 0; i < one.model->parameters().size(); ++i) {
    // Subnormal FP16 numbers (below 6e-5) keep fewer digits, so only nearly the same.
    EXPECT_TRUE(testing::close_in_norm(many.model->parameters()[i], one.model->parameters()[i], 1e-3));
  }
}

TEST(StepperScaling, GoesOnWithTheScaleThatWasSaved) {
  const Batch batch = regression_batch(4);
  const StepperOptions options{.precision = Precision::Float16,
                               .sixteen_bit = {.scaler = {.init_scale = 8, .growth_interval = 2}}};
  AdamWTraining run(options);
  for (int i = 0; i < 3; ++i) {
    run.step(batch);
  }
  AdamWTraining resumed(options);
  resumed.stepper.load_state_dict(run.stepper.state_dict());
  run.step(batch);
  resumed.step(batch);
  EXPECT_EQ(run.stepper.scaler().get_scale(), 32.0);
  EXPECT_EQ(resumed.stepper.scaler().get_scale(), 32.0);
  AdamWTraining other;
  EXPECT_THROW(other.stepper.load_state_dict(run.stepper.state_dict()), ConfigError);
}

// --- the precision

TEST(StepperPrecision, AutoIsResolvedOnceAndGoesWithTheState) {
  AdamWTraining run({.precision = Precision::Auto});
  const Precision chosen = run.stepper.precision();
  EXPECT_TRUE(chosen == Precision::Float32 || chosen == Precision::BFloat16);
  StateDict state = run.stepper.state_dict();
  EXPECT_EQ(state.get<std::string>("precision"), to_string(chosen));
  state.set("precision", std::string("bfloat16"));
  AdamWTraining resumed({.precision = Precision::Auto});
  resumed.stepper.load_state_dict(state);
  EXPECT_EQ(resumed.stepper.precision(), Precision::BFloat16) << "a run goes on in the precision it began with";
}

TEST(StepperPrecision, AutoIsMeasuredOnceForADevice) {
  static std::atomic<int> products;
  AdamWTraining first({.precision = Precision::Auto});
  products = 0;
  const auto callback = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                                products += std::string_view(function.name()) == "aten::mm" ? 1 : 0;
                                                return std::unique_ptr<at::ObserverContext>();
                                              }).scopes({at::RecordScope::FUNCTION}));
  const auto a = torch::ones({2, 2});
  torch::mm(a, a);
  EXPECT_EQ(products, 1) << "the counter counts";
  AdamWTraining second({.precision = Precision::Auto});
  at::removeCallback(callback);
  EXPECT_EQ(products, 1);
  EXPECT_EQ(first.stepper.precision(), second.stepper.precision());
}

TEST(StepperPrecision, ComputesTheForwardInItAndTheLossSeesItsType) {
  const Batch batch = regression_batch(4);
  for (const auto precision : {Precision::Float32, Precision::BFloat16, Precision::Float16}) {
    AdamWTraining run({.precision = precision});
    c10::ScalarType seen = torch::kInt;
    run.stepper.step(batch, [&](const Batch& micro) {
      const Tensor y = run.model->forward(micro[0]);
      seen = y.scalar_type();
      return Loss::sum((y.to(torch::kFloat) - micro[1]).pow(2).sum(), micro[1].numel());
    });
    EXPECT_EQ(seen, compute_dtype(precision));
    for (const Tensor& parameter : run.model->parameters()) {
      EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
      EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
    }
  }
}

TEST(StepperPrecision, WithFp32ReductionsRunsSoftmaxAndNormsInFp32AndProductsIn16Bits) {
  torch::manual_seed(1);
  torch::nn::Linear layer(4, 4);
  torch::nn::LayerNorm norm(std::vector<int64_t>{4});
  torch::nn::Sequential model(layer, norm);
  SGD optimizer(model->parameters());
  for (const bool on : {false, true}) {
    Stepper stepper(model, optimizer, {.precision = Precision::BFloat16, .sixteen_bit = {.fp32_reductions = on}});
    std::vector<at::ScalarType> types;
    stepper.step(Batch{torch::randn({2, 4})}, [&](const Batch& micro) {
      const Tensor product = layer->forward(micro[0]);
      const Tensor normed = norm->forward(product);
      const Tensor probabilities = torch::softmax(product, 1);
      types = {product.scalar_type(), normed.scalar_type(), probabilities.scalar_type()};
      return Loss::sum((normed * probabilities).to(torch::kFloat).sum(), micro.size());
    });
    const auto rest = on ? torch::kFloat : torch::kBFloat16;
    EXPECT_EQ(types, (std::vector<at::ScalarType>{torch::kBFloat16, rest, rest})) << on;
  }
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer, {.sixteen_bit = {.fp32_reductions = true}}); }),
              HasSubstr("fp32_reductions changes nothing in Float32"));
}

}  // namespace
}  // namespace snug::stepper_precision_test
