#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

// Weights::Low, the classic flow of mixed precision: 16-bit weights, forward and backward; FP32 gradients, masters and
// update.

namespace snug::low_weights_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;
using torch::Tensor;

torch::ScalarType type_of(Precision precision) { return compute_dtype(precision); }

struct Training {
  torch::nn::Sequential model = tiny_model();
  std::unique_ptr<torch::optim::SGD> optimizer;
  std::unique_ptr<Stepper> stepper;

  explicit Training(StepperOptions options) {
    model->to(type_of(options.precision));
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1));
    options.weights = Weights::Low;
    stepper = std::make_unique<Stepper>(model, *optimizer, options);
  }
  StepResult step(const Batch& batch) {
    return stepper->step(
        batch, [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); });
  }
  std::vector<Tensor> masters() const { return testing::clones_of(optimizer->param_groups()[0].params()); }
};

// The same by hand, in the order of the classic recipe.
std::vector<Tensor> by_hand(Precision precision, const std::vector<Batch>& micro_batches, double scale, double clip) {
  auto model = tiny_model();
  model->to(type_of(precision));
  const auto low = model->parameters();
  std::vector<Tensor> masters, sums;
  for (const Tensor& p : low) {
    masters.push_back(p.detach().to(torch::kFloat));
    sums.push_back(torch::zeros_like(masters.back()));
  }
  int64_t items = 0;
  for (const Batch& micro : micro_batches) {
    items += micro[1].numel();
  }
  for (const Batch& micro : micro_batches) {
    const Tensor out = model->forward(micro[0].to(type_of(precision))).to(torch::kFloat);
    ((out - micro[1]).square().sum() / static_cast<double>(items) * scale).backward();
    for (size_t i = 0; i < low.size(); ++i) {
      sums[i] += low[i].grad().to(torch::kFloat);
      low[i].mutable_grad().reset();
    }
  }
  double squares = 0;
  for (Tensor& sum : sums) {
    sum *= 1.0 / scale;
    squares += sum.square().sum().item<double>();
  }
  const double factor = std::min(1.0, clip / (std::sqrt(squares) + 1e-6));
  for (size_t i = 0; i < masters.size(); ++i) {
    masters[i] -= sums[i] * factor * 0.1;
  }
  return masters;
}

class LowWeights : public ::testing::TestWithParam<Precision> {};
INSTANTIATE_TEST_SUITE_P(Types, LowWeights, ::testing::Values(Precision::BFloat16, Precision::Float16),
                         [](const auto& param_info) { return std::string(to_string(param_info.param)); });

TEST_P(LowWeights, FollowTheClassicRecipe) {
  const Batch batch = tiny_batch(12);
  Training run(
      {.precision = GetParam(), .micro_batch = 4, .clip_norm = 0.05, .sixteen_bit = {.scaler = {.init_scale = 256}}});
  const auto result = run.step(batch);
  EXPECT_TRUE(result.stepped());
  EXPECT_GT(result.grad_norm(), 0.05);
  const double scale = GetParam() == Precision::Float16 ? 256 : 1;
  const auto expected = by_hand(GetParam(), micro_batches(batch, 4), scale, 0.05);
  // Only the clipping coefficient and the update are rounded differently, in FP32.
  EXPECT_TRUE(testing::close_in_norm(run.masters(), expected, 1e-6));
  const auto low = run.model->parameters();
  for (size_t i = 0; i < low.size(); ++i) {
    EXPECT_EQ(low[i].scalar_type(), type_of(GetParam()));
    EXPECT_TRUE(same_bits(low[i].detach(), run.masters()[i].to(type_of(GetParam()))));
    EXPECT_FALSE(low[i].grad().defined()) << "gathered";
  }
}

TEST_P(LowWeights, GoOnToTheBitAfterLoading) {
  const Batch batch = tiny_batch(12);
  Training run({.precision = GetParam(), .micro_batch = 4});
  run.step(batch);
  run.step(batch);
  Training resumed({.precision = GetParam(), .micro_batch = 4});
  resumed.stepper->load_state_dict(run.stepper->state_dict());
  EXPECT_TRUE(same_bits(resumed.masters(), run.masters()));
  EXPECT_TRUE(same_bits(testing::clones_of(resumed.model->parameters()), testing::clones_of(run.model->parameters())));
  run.step(batch);
  resumed.step(batch);
  EXPECT_TRUE(same_bits(resumed.masters(), run.masters()));
}

TEST_P(LowWeights, AreFollowedByFullPrecisionUnderTheirNames) {
  Training run({.precision = GetParam()});
  run.step(tiny_batch(4));
  const auto full = run.stepper->full_precision_parameters();
  ASSERT_EQ(full.size(), run.model->parameters().size());
  EXPECT_EQ(full.at("0.weight").scalar_type(), torch::kFloat);
  EXPECT_TRUE(same_bits(full.at("0.weight"), run.masters()[0]));
}

TEST(LowWeightsScaling, ASkippedStepScattersNothingNew) {
  Training run({.precision = Precision::Float16, .sixteen_bit = {.scaler = {.init_scale = std::ldexp(1.0, 100)}}});
  const auto masters = run.masters();
  const auto low = testing::clones_of(run.model->parameters());
  EXPECT_FALSE(run.step(tiny_batch(4)).stepped());
  EXPECT_TRUE(same_bits(run.masters(), masters));
  EXPECT_TRUE(same_bits(testing::clones_of(run.model->parameters()), low));
}

// A master follows its parameter: left frozen, it would keep its old gradient and be stepped by the sum of both.
TEST_P(LowWeights, MayBeFrozenAndUnfrozenBetweenSteps) {
  const Batch batch = tiny_batch(10);
  Training run({.precision = GetParam(), .micro_batch = 4});
  Training reference({.precision = GetParam(), .micro_batch = 4});
  const Tensor first = run.model->parameters().front();
  first.set_requires_grad(false);
  run.stepper->load_state_dict(run.stepper->state_dict());
  run.step(batch);
  first.set_requires_grad(true);
  reference.stepper->load_state_dict(run.stepper->state_dict());  // has masters that never were frozen
  for (int i = 0; i < 2; ++i) {
    run.step(batch);
    reference.step(batch);
  }
  EXPECT_TRUE(same_bits(run.masters(), reference.masters()));
}

TEST(LowWeightsErrors, NameTheParameterAndTheCure) {
  const auto stepper_error = [](auto dtype, StepperOptions options, bool step_first = false) {
    return error_of<ConfigError>([&] {
      auto model = tiny_model();
      model->to(dtype);
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      if (step_first) {
        model->forward(torch::ones({1, 6}, dtype)).sum().backward();
        optimizer.step();
      }
      Stepper(model, optimizer, options);
    });
  };
  EXPECT_THAT(stepper_error(torch::kBFloat16, {}), HasSubstr("'0.weight' is BFloat16"));
  EXPECT_THAT(stepper_error(torch::kBFloat16, {.weights = Weights::Low}), HasSubstr("precision"));
  EXPECT_THAT(stepper_error(torch::kBFloat16, {.precision = Precision::Float16, .weights = Weights::Low}),
              HasSubstr("'0.weight' is BFloat16, but precision is float16"));
  EXPECT_THAT(stepper_error(torch::kFloat, {.precision = Precision::Float16, .weights = Weights::Low}),
              HasSubstr("to(Half)"));
  EXPECT_THAT(stepper_error(torch::kHalf, {.precision = Precision::Float16}), HasSubstr("'0.weight' is Half"));
  EXPECT_THAT(stepper_error(torch::kHalf, {.precision = Precision::Float16, .weights = Weights::Low}, true),
              HasSubstr("stepped before"));
}

// Who holds masters: the Stepper, or AdamW, and never both.
TEST(LowWeightsErrors, SayWhereMastersAreHeldTwiceOrNowhere) {
  auto model = tiny_model();
  model->to(torch::kBFloat16);
  const auto make = [&](AdamWOptions of_adamw, Weights weights) {
    AdamW optimizer(model->parameters(), of_adamw);
    Stepper(model, optimizer, {.precision = Precision::BFloat16, .weights = weights});
  };
  const auto error = [&](AdamWOptions of_adamw, Weights weights) {
    return error_of<ConfigError>([&] { make(of_adamw, weights); });
  };
  EXPECT_THAT(error({.master_weights = true}, Weights::Low), HasSubstr("would have no effect"));
  EXPECT_THAT(error({.stochastic_rounding = true}, Weights::Low), HasSubstr("would have no effect"));
  EXPECT_THAT(error({}, Weights::Full), HasSubstr("'0.weight' is BFloat16"));
  EXPECT_NO_THROW(make({}, Weights::Low));
  EXPECT_NO_THROW(make({.master_weights = true}, Weights::Full));
}

TEST(StepperErrors, AnOptimizerOfAnotherModelIsRefused) {
  auto model = tiny_model();
  auto other = tiny_model();
  torch::optim::SGD optimizer(other->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer); }), HasSubstr("another model"));
}

TEST(LowWeightsErrors, AStateOfOtherWeightsIsRefusedBothWays) {
  Training low({.precision = Precision::BFloat16});
  auto model = tiny_model();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper full(model, optimizer, {.precision = Precision::BFloat16});
  EXPECT_THAT(error_of<ConfigError>([&] { full.load_state_dict(low.stepper->state_dict()); }),
              HasSubstr("weights low, this one has full"));
  EXPECT_THAT(error_of<ConfigError>([&] { low.stepper->load_state_dict(full.state_dict()); }),
              HasSubstr("weights full, this one has low"));
}

// What a Stepper needs to try again, whatever its constructor threw.
TEST(LowWeightsErrors, AConstructorThatThrowsLeavesTheOptimizerTheModelsWeights) {
  auto model = tiny_model();
  model->to(torch::kBFloat16);
  AdamW optimizer(model->parameters());
  StepperOptions options{.precision = Precision::BFloat16, .weights = Weights::Low};
  StepperOptions tight = options, noisy = options;
  tight.budget.memory = Bytes(1);
  noisy.gradient_noise = true;
  EXPECT_THROW(Stepper(model, optimizer, tight), BudgetExceeded);
  EXPECT_THROW(Stepper(model, optimizer, noisy), ConfigError);
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(optimizer.param_groups()[0].params()[i].is_same(model->parameters()[i]));
  }
  EXPECT_NO_THROW(Stepper(model, optimizer, options));
}

TEST_P(LowWeights, GoOnUnderAnotherStepperWithTheSameOptimizer) {
  const Batch batch = tiny_batch(8);
  const auto train = [&](auto optimizer_of, bool other_stepper) {
    auto model = tiny_model();
    model->to(type_of(GetParam()));
    const auto optimizer = optimizer_of(model->parameters());
    const StepperOptions options{.precision = GetParam(), .weights = Weights::Low};
    std::optional<Stepper> stepper(std::in_place, model, *optimizer, options);
    for (int step = 0; step < 4; ++step) {
      if (other_stepper && step == 2) {
        const StateDict state = stepper->state_dict();
        stepper.reset();
        stepper.emplace(model, *optimizer, options);
        stepper->load_state_dict(state);
      }
      stepper->step(batch,
                    [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); });
    }
    return testing::clones_of(optimizer->param_groups()[0].params());
  };
  const auto check = [&](const char* name, auto make) {
    EXPECT_TRUE(same_bits(train(make, true), train(make, false))) << name;
  };
  using Parameters = std::vector<Tensor>;
  check("AdamW", [](const Parameters& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.01}); });
  check("torch's AdamW",
        [](const Parameters& p) { return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.01)); });
}

// As a program does that saves the optimizer when its Stepper is gone, and resumes by loading it first.
TEST_P(LowWeights, TheStateIsSavedAfterTheStepperAndLoadedBeforeTheNext) {
  const Batch batch = tiny_batch(8);
  auto model = tiny_model();
  model->to(type_of(GetParam()));
  AdamW optimizer(model->parameters(), {.lr = 0.01}), resumed(model->parameters(), {.lr = 0.01});
  const StepperOptions options{.precision = GetParam(), .weights = Weights::Low};
  const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
  Stepper(model, optimizer, options).step(batch, loss_of);
  resumed.load_state_dict(optimizer.state_dict());
  EXPECT_TRUE(same_bits(testing::tensors_in(resumed.state_dict()), testing::tensors_in(optimizer.state_dict())));
  EXPECT_TRUE(Stepper(model, resumed, options).step(batch, loss_of).stepped());
}

TEST_P(LowWeights, OfASparseEmbeddingAreTrained) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  embedding->to(type_of(GetParam()));
  torch::optim::SGD optimizer(embedding->parameters(), torch::optim::SGDOptions(0.5));
  Stepper stepper(embedding, optimizer, {.precision = GetParam(), .weights = Weights::Low});
  const Tensor before = optimizer.param_groups()[0].params()[0].detach().clone();
  const auto result = stepper.step(Batch{torch::tensor({1, 1, 2})}, [&](const Batch& micro) {
    return Loss::sum(embedding->forward(micro[0]).to(torch::kFloat).sum(), 4);
  });
  EXPECT_TRUE(result.stepped());
  const Tensor steps = (before - optimizer.param_groups()[0].params()[0].detach()).select(1, 0);
  EXPECT_TRUE(torch::allclose(steps, torch::tensor({0.0f, 0.25f, 0.125f, 0.0f})));
}

}  // namespace
}  // namespace snug::low_weights_test
