// The time of operators where the device is faster than the host.

#include "src/remat/operator_clock.h"

#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/plan.h"
#include "src/planner/simulator.h"
#include "src/remat/profile_step.h"
#include "tests/accelerator/accelerator.h"

namespace snug::operator_clock_test {
namespace {

using testing::leaf;
using torch::Tensor;

constexpr double kTick = 0.25;

// Each look at the clock comes a quarter of a second after the last.
double slow_host() {
  static double now = 0;
  return now += kTick;
}

TEST(OperatorClock, CountsTheProgramsTimeWithoutThatOfTapeAndRecorder) {
  using Worker = detail::OperatorClock::Worker;
  const detail::HostClock before = detail::set_host_clock(&slow_host);
  detail::OperatorClock clock(testing::accelerator());
  const auto from = clock.mark();
  EXPECT_EQ(clock.switch_to(Worker::Tape), Worker::Program);
  EXPECT_EQ(clock.switch_to(Worker::Program), Worker::Tape);
  const auto to = clock.mark();
  detail::set_host_clock(before);
  EXPECT_EQ(clock.of_host({{from, to}}), std::vector<double>({2 * kTick})) << "before and after the tape";
  EXPECT_GT(clock.of_tape(), 0);
}

TEST(OperatorClock, GivesAProfileTheTimesOfASlowHost) {
  const Tensor x = leaf({16});
  const auto forward = [&] { return x.sin().exp().sum(); };
  const detail::HostClock before = detail::set_host_clock(&slow_host);
  const plan::Profile slow = detail::profile_step(forward);
  detail::set_host_clock(before);
  EXPECT_GE(slow.host_seconds, 5 * kTick) << "sin, exp, sum, and between the three";
  EXPECT_GT(slow.tape_seconds, 0);
  EXPECT_EQ(slow.plain_seconds(), slow.host_seconds);
  EXPECT_EQ(slow.plain_seconds(), plan::Simulator(slow).run(plan::keep_all(slow)).seconds);
  if (sim_device::is_present()) {
    const plan::Profile fast = detail::profile_step(forward);
    for (const plan::Operator& op : fast.operators) {
      EXPECT_EQ(op.seconds, sim_device::kOperatorSeconds) << op.name;
    }
    EXPECT_EQ(fast.host_seconds, 0) << "the host works while the device does";
  }
}

TEST(OperatorClock, TellsTheKernelsTimeFromTheHostsWhereTheHostSetsThePace) {
  if (!sim_device::is_present()) {
    GTEST_SKIP() << "the pace of the simulated accelerator's host is known";
  }
  constexpr double kPace = 8 * sim_device::kOperatorSeconds;
  const Tensor x = leaf({16});
  const auto forward = [&] { return x.sin().sin().sin().sin().sum(); };
  const sim_device::HostPace pace(kPace);
  const plan::Profile profile = detail::profile_step(forward);
  for (const plan::Operator& op : profile.operators) {
    EXPECT_EQ(op.seconds, sim_device::kOperatorSeconds) << op.name;
  }
  const double began = sim_device::host_seconds();
  forward().backward();
  EXPECT_EQ(profile.plain_seconds(), sim_device::host_seconds() - began);
}

}  // namespace
}  // namespace snug::operator_clock_test
