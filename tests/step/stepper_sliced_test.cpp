#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/distributed/process_group.h"
#include "snug/memory.h"
#include "snug/sliced.h"
#include "snug/stepper.h"
#include "tests/distributed/ranks.h"
#include "tests/support/tensors.h"

// A single sample whose first layer does not fit even alone: the Stepper's plan cuts it into slices.

namespace snug::stepper_sliced_test {
namespace {

using testing::clones_of;
using testing::close_in_norm;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using torch::Tensor;
namespace nn = torch::nn;

struct PointNetImpl : nn::Module {
  static constexpr int64_t kFeatures = 16;

  nn::Linear features{nn::LinearOptions(3, kFeatures)};
  nn::Linear head{nn::LinearOptions(kFeatures, 1)};

  PointNetImpl() {
    register_module("features", features);
    register_module("head", head);
  }
  // [items, points, 3] to [items, 1]
  Tensor forward(const Tensor& clouds) {
    const auto largest = [features = features](Tensor points) mutable {
      return torch::amax(torch::relu(features->forward(points)), 1, /*keepdim=*/true);
    };
    return head->forward(sliced(largest, clouds, {.dim = 1}).amax(1));
  }
};
TORCH_MODULE(PointNet);

struct Training {
  PointNet model;
  AdamW optimizer;
  std::optional<DataParallel> parallel;
  std::optional<Stepper> stepper;

  explicit Training(StepperOptions options = {}, const std::shared_ptr<ProcessGroup>& group = nullptr)
      : model(seeded()), optimizer(model->parameters(), {.lr = 0.01}) {
    if (group) {
      options.ranks.data_parallel = &parallel.emplace(model, group);
    }
    stepper.emplace(model, optimizer, options);
  }
  static PointNet seeded() {
    torch::manual_seed(3);
    return {};
  }
  StepResult step(const Batch& batch) {
    return stepper->step(batch, [this](const Batch& micro) {
      return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
    });
  }
};

Batch clouds(int64_t items, int64_t points, uint64_t seed = 7) {
  torch::manual_seed(seed);
  return {torch::rand({items, points, 3}), torch::ones({items, 1})};
}

int64_t first_layer_bytes(int64_t points) { return points * PointNetImpl::kFeatures * 4; }
int64_t live() { return live_bytes(torch::kCPU).count(); }

TEST(StepperSliced, TrainsOnASampleOf30MillionNumbersWhoseFirstLayerDoesNotFit) {
  constexpr int64_t kPoints = 10'000'000;
  const Batch batch = clouds(1, kPoints);
  ASSERT_EQ(batch[0].numel(), 30'000'000);
  const int64_t budget = live() + first_layer_bytes(kPoints) / 4;
  Training run({.budget = {.memory = Bytes(budget)}});
  const StepResult result = run.step(batch);
  EXPECT_LE(result.peak_bytes, budget);
  const auto plan = run.stepper->plan();
  ASSERT_TRUE(plan);
  EXPECT_GE(plan->slices, 4);
  EXPECT_THAT(plan->explain(), HasSubstr(std::to_string(plan->slices) + " slices"));
  EXPECT_THAT(plan->verdict(), HasSubstr("Slices"));
  EXPECT_EQ(StepPlan::from_json(plan->to_json()).slices, plan->slices);
}

TEST(StepperSliced, HasTheBitsOfTheWholeWhereNothingIsSummedOverSlices) {
  constexpr int64_t kPoints = 300'000;
  const Batch batch = clouds(1, kPoints);
  Training run({.budget = {.memory = Bytes(live() + first_layer_bytes(kPoints) / 4)}});
  const StepResult result = run.step(batch);
  ASSERT_GE(run.stepper->plan()->slices, 4);
  Training plain;
  EXPECT_EQ(plain.step(batch).loss(), result.loss()) << "a point's features do not depend on the others";
  const auto parameters = run.model->parameters(), expected = plain.model->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    // Each feature's largest point gives the gradient, so there is one term in each sum: nothing rounds in another
    // order.
    EXPECT_TRUE(same_bits(parameters[i], expected[i])) << i;
  }
}

TEST(StepperSliced, PlansForTheSampleOfEachOfTwoRanks) {
  on_ranks(2, [] {
    constexpr int64_t kPoints = 300'000;
    const auto group = init_process_group(quick());
    const Batch own = clouds(1, kPoints, 7 + static_cast<uint64_t>(group->rank()));
    const int64_t budget = live() + first_layer_bytes(kPoints) / 4;
    Training run({.budget = {.memory = Bytes(budget)}}, group);
    const StepResult result = run.step(own);
    EXPECT_LE(result.peak_bytes, budget);
    ASSERT_TRUE(run.stepper->plan());
    EXPECT_GE(run.stepper->plan()->slices, 4);
    Training plain;
    plain.step({torch::cat({clouds(1, kPoints, 7)[0], clouds(1, kPoints, 8)[0]}), torch::ones({2, 1})});
    const auto parameters = run.model->parameters(), expected = plain.model->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close_in_norm(parameters[i], expected[i], 1e-6)) << i;
    }
  });
}

TEST(StepperSliced, CutsASmallerMicroBatchFirst) {
  constexpr int64_t kPoints = 20'000;
  const Batch batch = clouds(8, kPoints);
  Training run({.budget = {.memory = Bytes(live() + 4 * first_layer_bytes(kPoints))}});
  EXPECT_GT(run.step(batch).micro_batches, 1);
  EXPECT_EQ(run.stepper->plan()->slices, 1);
}

TEST(StepperSliced, KeepsItsSlicesInTheState) {
  constexpr int64_t kPoints = 100'000;
  const Batch batch = clouds(1, kPoints);
  const int64_t budget = live() + first_layer_bytes(kPoints) / 4;
  Training first({.budget = {.memory = Bytes(budget)}});
  first.step(batch);
  const int64_t slices = first.stepper->plan()->slices;
  // With twice the memory another would plan for fewer.
  Training second({.budget = {.memory = Bytes(live() + first_layer_bytes(kPoints))}});
  second.step(batch);
  EXPECT_LT(second.stepper->plan()->slices, slices);
  second.stepper->load_state_dict(first.stepper->state_dict());
  second.step(batch);
  EXPECT_EQ(second.stepper->plan()->slices, slices);
}

TEST(StepperSliced, CutsFinerWhenLessIsLeft) {
  constexpr int64_t kPoints = 300'000;
  const Batch batch = clouds(1, kPoints);
  Training run({.budget = {.memory = Bytes(live() + first_layer_bytes(kPoints))}});
  run.step(batch);
  const int64_t slices = run.stepper->plan()->slices;
  const Tensor other = torch::empty({first_layer_bytes(kPoints) / 4 * 3}, torch::kByte);
  run.step(batch);
  EXPECT_GT(run.stepper->plan()->slices, slices);
}

TEST(StepperSliced, ThatDoesNotHelpIsRefused) {
  constexpr int64_t kPoints = 100'000;
  const Batch batch = clouds(1, kPoints);
  Training run({.budget = {.memory = Bytes(live() + (64 << 10))}});
  const auto before = clones_of(run.model->parameters());
  EXPECT_THAT(error_of<BudgetExceeded>([&] { run.step(batch); }), HasSubstr("no plan was found"));
  EXPECT_TRUE(same_bits(run.model->parameters(), before));
}

}  // namespace
}  // namespace snug::stepper_sliced_test
