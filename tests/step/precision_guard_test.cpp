#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/precision.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "src/precision/guard_evidence.h"
#include "tests/support/tensors.h"

// A region whose values do not fit into FP16 ends up in FP32, and only it.

namespace snug::precision_guard_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
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
    const Tensor y = recompute ? checkpoint([this](const Tensor& t) { return inside(t); }, h) : inside(h);
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

  explicit Training(PrecisionGuardOptions guard, Precision precision = Precision::Float16)
      : stepper(model, optimizer,
                {.precision = precision, .sixteen_bit = {.scaler = {.init_scale = 1}, .guard = guard}}) {}
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
    EXPECT_EQ(run.model->seen, std::vector<torch::ScalarType>(1, torch::kFloat));
  }
}

TEST(DynamicPrecision, WithoutAGuardNothingMoves) {
  Training run({});
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(run.step().stepped());
  }
}

// A run that chose FP16 by itself: Auto takes over what its state says.
Training auto_in_float16(PrecisionGuardOptions guard) {
  Training run(guard, Precision::Auto);
  run.stepper.load_state_dict(Training({}).stepper.state_dict());
  EXPECT_EQ(run.stepper.precision(), Precision::Float16);
  return run;
}

TEST(DynamicPrecision, IsPartOfAuto) {
  Training run = auto_in_float16({});
  for (int i = 1; i < PrecisionGuardOptions::kPatienceOfAuto; ++i) {
    EXPECT_TRUE(run.step().precision_changes.empty()) << i;
  }
  EXPECT_THAT(run.step().precision_changes, ElementsAre(HasSubstr("'hot' goes to float32")));
  EXPECT_TRUE(run.step().stepped());
}

TEST(DynamicPrecision, OfAutoTakesOtherOptionsAndCanBeTurnedOff) {
  Training soon = auto_in_float16({.patience = 2});
  soon.step();
  EXPECT_FALSE(soon.step().precision_changes.empty());
  Training off = auto_in_float16({.patience = 0});
  for (int i = 0; i < 2 * PrecisionGuardOptions::kPatienceOfAuto; ++i) {
    EXPECT_FALSE(off.step().stepped());
  }
}

TEST(GuardEvidence, SaysOfEachRegionWhetherAGradientIsNotFiniteAndHowManyAreZero) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto with_gradient = [](const Tensor& gradient) {
    Tensor parameter = torch::zeros_like(gradient).requires_grad_();
    parameter.mutable_grad() = gradient;
    return parameter;
  };
  const std::vector<std::pair<std::string, Tensor>> parameters{
      {"stem", with_gradient(torch::tensor({0.0f, -0.0f, 1.0f, 2.0f}))},
      {"a.weight", with_gradient(torch::tensor({kInf, -kInf, 0.0f}))},
      {"a.bias", with_gradient(torch::tensor({1.0, 2.0, 3.0}, torch::kDouble))},
      {"ab.weight", with_gradient(torch::full({4}, 60000.0, torch::kHalf))},
      {"ab.scale", with_gradient(torch::full({4}, 3e38f))},
      {"ab.none", with_gradient(torch::zeros({0}))},
      {"ab.bias", torch::zeros({9}, torch::requires_grad())}};
  const auto evidence = detail::gradient_evidence(parameters, {"ab", "a", "unused"})();
  ASSERT_EQ(evidence.size(), 3u);
  EXPECT_EQ(evidence[0].first, "");
  EXPECT_FALSE(evidence[0].second.non_finite);
  EXPECT_EQ(evidence[0].second.zeros, 0.5);
  EXPECT_EQ(evidence[1].first, "ab");
  EXPECT_FALSE(evidence[1].second.non_finite) << "their sums fit neither into FP16 nor into FP32, but they do";
  EXPECT_EQ(evidence[1].second.zeros, 0);
  EXPECT_EQ(evidence[2].first, "a");
  EXPECT_TRUE(evidence[2].second.non_finite);
  EXPECT_DOUBLE_EQ(evidence[2].second.zeros, 1.0 / 6);
}

TEST(DynamicPrecision, HasNothingToGuardInFloat32) {
  Hot model = hot_model();
  SGD optimizer(model->parameters());
  EXPECT_THROW(Stepper(model, optimizer, {.sixteen_bit = {.guard = {.patience = 1}}}), ConfigError);
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
                   .sixteen_bit = {.scaler = {.init_scale = 1}, .guard = {.patience = 1}}});
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

TEST(DynamicPrecision, ABrokenStateIsRefusedAndNothingHasChanged) {
  Training run({.patience = 1});
  run.step();
  const StateDict good = run.stepper.state_dict();
  const auto region = [](int64_t streak, int64_t stay, double zeros) {
    StateDict entry;
    entry.set("is_full", true);
    entry.set("streak", streak);
    entry.set("stay", stay);
    entry.set("since_back", int64_t{0});
    entry.set("zeros_in_full", zeros);
    return entry;
  };
  const std::vector<std::pair<std::string, StateDict>> entries{{"hot", region(1, 200, 0)},
                                                               {"region:hot", region(-1, 200, 0)},
                                                               {"region:hot", region(1, 0, 0)},
                                                               {"region:hot", region(1, 200, 1.5)},
                                                               {"region:hot", StateDict()}};
  for (const auto& [name, entry] : entries) {
    StateDict guard;
    guard.set(name, entry);
    StateDict broken;
    broken.set("precision", std::string("float16"));
    broken.set("scaler", good.get<StateDict>("scaler"));
    broken.set("precision_guard", guard);
    Training resumed({.patience = 1}, Precision::Auto);
    EXPECT_THROW(resumed.stepper.load_state_dict(broken), CorruptFile) << name;
    EXPECT_NE(resumed.stepper.precision(), Precision::Float16) << "a CPU's Auto never is";
  }
}

}  // namespace
}  // namespace snug::precision_guard_test
