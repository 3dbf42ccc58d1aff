#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/activations/checkpoint.h"
#include "snug/core/error.h"
#include "snug/optim/sgd.h"
#include "snug/precision/precision_scope.h"
#include "snug/train/stepper.h"
#include "tests/support/tensors.h"

// Dynamic precision in a step: a region whose values do not fit into FP16 ends up in FP32, and only it.

namespace snug {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

// "hot" has values around 1e6 inside, which FP16 cannot hold, and small ones at its end.
struct HotImpl : torch::nn::Module {
  torch::nn::Linear first{8, 8}, hot{8, 8}, last{8, 2};
  bool recompute = false;
  std::vector<torch::ScalarType> seen;  // the type of each call's inside

  HotImpl() {
    register_module("first", first);
    register_module("hot", hot);
    register_module("last", last);
  }
  Tensor inside(const Tensor& x) {
    const PrecisionScope scope("hot");
    const Tensor y = hot->forward(x * 1e3) * 1e3;
    seen.push_back(y.scalar_type());
    return y * 1e-6;
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = first->forward(x);
    const Tensor y =
        recompute ? checkpoint({.early_stop = false}, [this](const Tensor& t) { return inside(t); }, h) : inside(h);
    return last->forward(y);
  }
};
TORCH_MODULE(Hot);

Hot hot_model() {
  torch::manual_seed(1);
  return {};
}

Batch batch() {
  torch::manual_seed(2);
  return {torch::randn({4, 8}), torch::randn({4, 2})};
}

struct Training {
  Hot model = hot_model();
  SGD optimizer{model->parameters(), {.lr = 0.01}};
  Stepper stepper;

  explicit Training(PrecisionGuardOptions guard)
      : stepper(model, optimizer,
                {.precision = Precision::Float16, .scaler = {.init_scale = 1}, .precision_guard = guard}) {}
  StepResult step() {
    return stepper.step(batch(), [&](const Batch& micro) {
      return Loss::sum((model->forward(micro[0]).to(torch::kFloat) - micro[1]).square().sum(), micro[1].numel());
    });
  }
};

TEST(DynamicPrecision, MovesTheRegionThatOverflowsToFp32AndTrainingGoesOn) {
  for (const bool recompute : {false, true}) {
    Training run({.patience = 3});
    run.model->recompute = recompute;
    for (int i = 0; i < 2; ++i) {
      const auto result = run.step();
      EXPECT_FALSE(result.stepped());
      EXPECT_TRUE(result.precision_changes.empty());
    }
    EXPECT_THAT(run.step().precision_changes, ElementsAre(HasSubstr("'hot' goes to float32")));
    EXPECT_EQ(run.model->seen.back(), torch::kHalf);
    run.model->seen.clear();
    EXPECT_TRUE(run.step().stepped());
    EXPECT_EQ(run.model->seen, std::vector<torch::ScalarType>(recompute ? 2 : 1, torch::kFloat));
  }
}

TEST(DynamicPrecision, WithoutAGuardNothingMoves) {
  Training run({});
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(run.step().stepped());
  }
}

TEST(DynamicPrecision, HasNothingToGuardInFloat32) {
  Hot model = hot_model();
  SGD optimizer(model->parameters());
  EXPECT_THROW(Stepper(model, optimizer, {.precision_guard = {.patience = 1}}), ConfigError);
}

TEST(DynamicPrecision, GoesWithTheState) {
  Training run({.patience = 1});
  run.step();
  Training resumed({.patience = 1});
  resumed.stepper.load_state_dict(run.stepper.state_dict());
  EXPECT_TRUE(run.step().stepped());
  EXPECT_TRUE(resumed.step().stepped());
  EXPECT_TRUE(same_bits(testing::clones_of(run.model->parameters()), testing::clones_of(resumed.model->parameters())));
}

class WholeStep : public ::testing::TestWithParam<Weights> {};
INSTANTIATE_TEST_SUITE_P(Weights, WholeStep, ::testing::Values(Weights::Full, Weights::Low));

TEST_P(WholeStep, MovesWhereNoRegionIsNamed) {
  torch::manual_seed(1);
  torch::nn::Linear layer(4, 4);
  if (GetParam() == Weights::Low) {
    layer->to(torch::kHalf);
  }
  torch::optim::SGD optimizer(layer->parameters(), torch::optim::SGDOptions(0.01));
  Stepper stepper(layer, optimizer,
                  {.precision = Precision::Float16,
                   .weights = GetParam(),
                   .scaler = {.init_scale = 1},
                   .precision_guard = {.patience = 1}});
  torch::ScalarType seen = torch::kInt;
  const auto step = [&] {
    return stepper.step(Batch{torch::ones({2, 4})}, [&](const Batch& micro) {
      const Tensor y = layer->forward(micro[0] * 1e6);
      seen = y.scalar_type();
      return Loss::sum((y * 1e-6).to(torch::kFloat).square().sum(), micro.size());
    });
  };
  EXPECT_THAT(step().precision_changes, ElementsAre(HasSubstr("the whole step goes to float32")));
  EXPECT_EQ(seen, torch::kHalf);
  EXPECT_TRUE(step().stepped());
  EXPECT_EQ(seen, torch::kFloat);
}

}  // namespace
}  // namespace snug
