// What a backward pass takes itself is known once it has run, or has failed: a step that fits only where that is known
// is profiled within a limit all the same.

#include <chrono>
#include <ctime>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "src/remat/activation_plan.h"
#include "src/remat/operator_clock.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/tensors.h"

namespace snug::profile_within_limit_test {
namespace {

using testing::clones_of;
using testing::kSearch;
using testing::OneThread;
using testing::same_bits;
using torch::Tensor;

constexpr int64_t kUnit = 1 << 16, kUnitBytes = 4 * kUnit;

int64_t live() { return live_bytes(torch::kCPU).count(); }

// The identity, whose backward takes a workspace that nothing of the forward pass tells of.
struct Hungry : torch::autograd::Function<Hungry> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, int64_t units) {
    context->saved_data["units"] = units;
    return x.clone();
  }
  static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, const std::vector<Tensor>& gradients) {
    const Tensor workspace = torch::zeros({context->saved_data["units"].toInt() * kUnit});
    return {gradients[0] + workspace[0], Tensor()};
  }
};

// Takes 9 units at its beginning, which no plan can do without, and then saves 7.
struct WideThenDeepImpl : torch::nn::Module {
  explicit WideThenDeepImpl(std::vector<int64_t> of_layers) : workspaces(std::move(of_layers)) {
    weight = register_parameter("weight", torch::full({1}, 0.5));
  }
  Tensor forward(const Tensor& x) {
    Tensor h = (x * weight).repeat({8, 1}).sum(0);
    for (const int64_t units : workspaces) {
      h = h.sigmoid();
      h = units > 0 ? Hungry::apply(h, units) : h;
    }
    return h.square().sum();
  }
  std::vector<int64_t> workspaces;
  Tensor weight;
};
TORCH_MODULE(WideThenDeep);

Tensor input() {
  torch::manual_seed(1);
  return torch::randn({kUnit});
}

int64_t plain_peak(const plan::Profile& profile) {
  return detail::unverified_plan(profile, Bytes::unlimited(), kSearch).plain_peak_bytes;
}

TEST(ProfileStep, LearnsFromABackwardPassThatFailedWhatTheNextOneHasToLeaveFree) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  for (const auto& workspaces :
       std::vector<std::vector<int64_t>>{{0, 0, 0, 0, 0, 0, 5}, {0, 0, 5, 0, 0, 0, 0}, {0, 0, 6, 0, 0, 5, 5}}) {
    WideThenDeep model(workspaces);
    const Tensor x = input();
    const auto loss = [&] { return model->forward(x); };
    const plan::Profile plain = detail::profile_step(loss);
    const int64_t room = 10 * kUnitBytes;
    ASSERT_GT(plain_peak(plain), room);
    const MemoryLimit limit(torch::kCPU, Bytes(live() + room + (16 << 10)));
    const plan::Profile found = detail::profile_step(loss);
    EXPECT_EQ(plain_peak(found), plain_peak(plain));
    EXPECT_EQ(found.storages, plain.storages);
    EXPECT_EQ(found.events, plain.events);
  }
}

TEST(ProfileStep, GivesUpWhereWhatItHasLearnedDoesNotDo) {
  WideThenDeep model(std::vector<int64_t>{0, 0, 0, 0, 0, 0, 16});
  const Tensor x = input();
  const int64_t before = live();
  const MemoryLimit limit(torch::kCPU, Bytes(before + 10 * kUnitBytes));
  EXPECT_THROW(detail::profile_step([&] { return model->forward(x); }), c10::OutOfMemoryError);
  EXPECT_EQ(live(), before);
}

TEST(ProfileStep, LetsAStepBeMadeThatFitsByWhatAFailedBackwardPassHasTold) {
  const auto train = [](bool is_tight) {
    WideThenDeep model(std::vector<int64_t>{0, 0, 0, 0, 0, 0, 5});
    SGD optimizer(model->parameters(), {.lr = 1e-4});
    const Tensor x = input().view({1, kUnit});
    const Bytes budget = is_tight ? Bytes(live() + 10 * kUnitBytes + (64 << 10)) : Bytes::unlimited();
    Stepper stepper(model, optimizer, {.micro_batch = 1, .budget = {.memory = budget}});
    for (int i = 0; i < 2; ++i) {
      const StepResult result =
          stepper.step({x}, [&](const Batch& micro) { return Loss::mean(model->forward(micro[0][0]), 1); });
      EXPECT_LE(result.peak_bytes, budget.count());
    }
    return clones_of(model->parameters());
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
}

// As an operator that reads its operands from a file. Such time must not look as if the operator cost nothing.
TEST(OperatorClock, CountsTheTimeInWhichAThreadWaits) {
  constexpr std::chrono::milliseconds kWait(20);
  detail::OperatorClock clock(c10::kCPU);
  const auto from = clock.mark();
  std::this_thread::sleep_for(kWait);
  const auto to = clock.mark();
  EXPECT_GE(clock.finish({{from, to}}).front(), std::chrono::duration<double>(kWait).count());
}

// As a parallel loop, of which one thread loses its processor to another program.
TEST(OperatorClock, LeavesOutTheTimeInWhichAThreadThatHelpsHasNoProcessor) {
  constexpr std::chrono::seconds kAway(2);
  detail::OperatorClock clock(c10::kCPU);
  const auto from = clock.mark();
  std::thread helper([&] {
    const std::clock_t begin = std::clock();
    while (std::clock() - begin < CLOCKS_PER_SEC / 50) {
    }
    std::this_thread::sleep_for(kAway);
  });
  helper.join();
  const auto to = clock.mark();
  const double seconds = clock.finish({{from, to}}).front();
  EXPECT_GT(seconds, 0);
  EXPECT_LT(seconds, std::chrono::duration<double>(kAway).count());
}

}  // namespace
}  // namespace snug::profile_within_limit_test
