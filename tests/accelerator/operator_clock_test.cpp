// The time of operators where the device is faster than the host.

#include "src/remat/operator_clock.h"

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

TEST(OperatorClock, IsTheHostsWhereTheDeviceDoesItsWorkInLessThanHalfOfTheTime) {
  EXPECT_TRUE(detail::is_bound_by_host(0.4, 1.0));
  EXPECT_FALSE(detail::is_bound_by_host(0.5, 1.0));
  EXPECT_FALSE(detail::is_bound_by_host(1.0, 0.0));
}

constexpr double kTick = 0.25;

// Each look at the clock comes a quarter of a second after the last.
double slow_host() {
  static double now = 0;
  return now += kTick;
}

TEST(OperatorClock, GivesAProfileTheTimesOfASlowHost) {
  const Tensor x = leaf({16});
  const auto forward = [&] { return x.sin().exp().sum(); };
  const detail::HostClock before = detail::set_host_clock(&slow_host);
  const plan::Profile slow = detail::profile_step(forward);
  detail::set_host_clock(before);
  for (const plan::Operator& op : slow.operators) {
    EXPECT_EQ(op.seconds, kTick) << op.name;
  }
  EXPECT_EQ(slow.host_seconds, 2 * kTick) << "between sin, exp and sum";
  EXPECT_EQ(slow.plain_seconds(), plan::Simulator(slow).run(plan::keep_all(slow)).seconds);
  if (sim_device::is_present()) {
    const plan::Profile fast = detail::profile_step(forward);
    for (const plan::Operator& op : fast.operators) {
      EXPECT_EQ(op.seconds, sim_device::kOperatorSeconds) << op.name;
    }
    EXPECT_EQ(fast.host_seconds, 0) << "the host works while the device does";
  }
}

}  // namespace
}  // namespace snug::operator_clock_test
