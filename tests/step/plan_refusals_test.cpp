// Where a budget is refused: what is thrown, and what the next step makes of it.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "tests/step/planned_training.h"
#include "tests/support/tensors.h"

namespace snug::plan_refusals_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;
using namespace testing::planned;

// Parts of the micro-batch are tried, to tell what the whole takes; one item alone has no variance.
TEST(PlanRefusals, OfAMicroBatchAreNotTheModelsErrorAboutPartsOfIt) {
  torch::manual_seed(1);
  nn::BatchNorm1d norm(64);
  nn::Linear head(64, 64);
  nn::Sequential model(head, norm);
  SGD optimizer(model->parameters(), {.lr = 0.1});
  const Tensor x = torch::randn({4, 64, 4096});
  Stepper stepper(model, optimizer, {.micro_batch = 4, .budget = {.memory = Bytes(live() + (7 << 20))}});
  std::vector<int64_t> tried;
  const auto step = [&] {
    stepper.step({x}, [&](const Batch& micro) {
      tried.push_back(micro.size());
      const Tensor h = (head->weight.mean() * micro[0]).sigmoid();
      return Loss::mean(norm->forward(h.mean(2)).square().mean(), micro.size());
    });
  };
  EXPECT_THAT(error_of<BudgetExceeded>(step), HasSubstr("no plan was found"));
  EXPECT_THAT(tried, ::testing::Contains(1));
}

// `at_once`: seven results in one expression, which lives until its semicolon. Otherwise each replaces the one before.
std::string refusal_of_seven_results(bool at_once) {
  torch::manual_seed(1);
  nn::Linear layer(64, 64);
  SGD optimizer(layer->parameters(), {.lr = 0.1});
  const Tensor x = torch::randn({2048, 64});
  Stepper stepper(*layer, optimizer, {.micro_batch = 2048, .budget = {.memory = Bytes(live() + (5 << 18))}});
  return error_of<BudgetExceeded>([&] {
    stepper.step({x}, [&](const Batch& micro) {
      Tensor h = layer->forward(micro[0]);
      if (at_once) {
        return Loss::mean(h.tanh().exp().sin().cos().exp().pow(2).mean(), micro.size());
      }
      h = h.tanh();
      h = h.exp();
      h = h.sin();
      h = h.cos();
      h = h.exp();
      h = h.pow(2);
      return Loss::mean(h.mean(), micro.size());
    });
  });
}

TEST(PlanRefusals, NameTheBytesThatTheProgramItselfHolds) {
  const std::string held = "held by the program after their last use";
  EXPECT_THAT(refusal_of_seven_results(true), ::testing::AllOf(HasSubstr(held), HasSubstr("until its semicolon")));
  EXPECT_THAT(refusal_of_seven_results(false),
              ::testing::AllOf(HasSubstr("at the peak of the smallest plan"), ::testing::Not(HasSubstr(held))));
}

// Gradients of a window are copied while a later micro-batch is tried, for which there is no room.
struct Windows {
  nn::Sequential model;
  SGD optimizer{model->parameters(), {.lr = 0.1}};
  std::optional<Stepper> stepper;

  Windows() : model(make_model()) {}

  static nn::Sequential make_model() { return testing::make_mlp({kWidth, 512, 512, kWidth}); }

  void begin(int64_t room) {
    stepper.emplace(model, optimizer,
                    StepperOptions{.budget = {.memory = Bytes(live() + room)}, .accumulate = {.every = 2}});
  }
  std::optional<StepResult> accumulate(const Batch& batch) {
    return stepper->accumulate(batch, [this](const Batch& micro) {
      return Loss::mean(torch::mse_loss(model->forward(micro[0]), micro[1]), micro.size());
    });
  }
};

constexpr int64_t kSmall = 4, kLarge = 128;

// Such that a window fits whichever of its micro-batches is large, and not a copy of all gradients beside.
int64_t room_for_windows() {
  Windows windows;
  windows.begin(int64_t{1} << 26);
  const int64_t before = live();
  windows.accumulate(make_batch(kLarge));
  const int64_t room = windows.stepper->plan()->choice.peak_bytes - before;
  windows.stepper->flush();
  return room + testing::bytes_of(windows.model->parameters()) / 4;
}

TEST(PlanRefusals, OfAWindowAreOfThatOneAlone) {
  const int64_t room = room_for_windows();
  const Batch small = make_batch(kSmall), large = make_batch(kLarge);
  Windows windows;
  const auto before = clones_of(windows.model->parameters());
  windows.begin(room);
  windows.accumulate(small);
  EXPECT_THROW(windows.accumulate(large), BudgetExceeded);
  EXPECT_TRUE(same_bits(windows.model->parameters(), before));
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(windows.accumulate(small));
    const auto result = windows.accumulate(large);
    ASSERT_TRUE(result && result->stepped());
    EXPECT_LE(result->peak_bytes, windows.stepper->plan()->budget_bytes);
  }
}

// Of a plan for later windows.
TEST(PlanRefusals, OfAWindowDoNotHideAnErrorOfTheLoss) {
  struct Stop : std::exception {};
  const int64_t room = room_for_windows();
  const Batch small = make_batch(kSmall), large = make_batch(kLarge);
  Windows windows;
  windows.begin(room);
  windows.accumulate(small);
  const Tensor weight = windows.model->parameters()[0];
  const auto has_gradient = [&] {  // by no operator, which the plan would see
    const Tensor& gradient = weight.grad();
    const float* first = gradient.defined() ? gradient.const_data_ptr<float>() : nullptr;
    return gradient.defined() && std::any_of(first, first + gradient.numel(), [](float one) { return one != 0; });
  };
  EXPECT_TRUE(has_gradient());
  const auto stop_without_window = [&](const Batch& micro) {
    if (micro.size() == kLarge && !has_gradient()) {
      throw Stop();
    }
    return Loss::mean(torch::mse_loss(windows.model->forward(micro[0]), micro[1]), micro.size());
  };
  EXPECT_THROW(windows.stepper->accumulate(large, stop_without_window), Stop);
  EXPECT_FALSE(has_gradient());
  windows.accumulate(small);
  EXPECT_TRUE(windows.accumulate(small)) << "another window";
}

// More than the budget may not be alive to find the number out. 0: unknown.
TEST(PlanRefusals, NameNoBudgetWhereNothingOfTheStepRunsAndSayWhy) {
  const auto refused = [](const Batch& batch, const std::function<nn::Sequential()>& make, int64_t room) {
    PlannedTraining run({}, make());
    Stepper stepper(run.model, run.optimizer, {.budget = {.memory = Bytes(live() + room)}});
    try {
      stepper.step(batch, [&](const Batch& micro) { return run.loss_of(micro); });
    } catch (const BudgetExceeded& error) {
      return std::pair(error.smallest_feasible().count(), std::string(error.what()));
    }
    ADD_FAILURE() << "a step";
    return std::pair(int64_t{-1}, std::string());
  };
  const int64_t weights = testing::bytes_of(deep()->parameters());
  const auto [least, of_model] = refused(make_batch(8), [] { return deep(); }, weights);
  EXPECT_EQ(least, 0);
  EXPECT_THAT(of_model, HasSubstr("weights, gradients, the optimizer's state and what an update takes are"));
  const int64_t result = 4 * kWidth * 8192;  // of an item; an operator has an operand and a result
  const auto [of_items, item] = refused(two_large_items(), [] { return very_deep(); }, result * 3 / 2);
  EXPECT_EQ(of_items, 0);
  EXPECT_THAT(item, HasSubstr("how much is not known"));
}

}  // namespace
}  // namespace snug::plan_refusals_test
