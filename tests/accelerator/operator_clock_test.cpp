// The time of operators where the device is faster than the host.

#include "src/remat/operator_clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/plan.h"
#include "src/planner/simulator.h"
#include "src/remat/profile_step.h"
#include "tests/accelerator/accelerator.h"

namespace snug::operator_clock_test {
namespace {

using testing::accelerator;
using testing::leaf;
using torch::Tensor;

TEST(OperatorClock, CountsTheHostsTimeIfTheDeviceWorksInLessThanHalfOfTheTime) {
  EXPECT_TRUE(detail::is_bound_by_host(0.4, 1.0));
  EXPECT_FALSE(detail::is_bound_by_host(0.5, 1.0));
  EXPECT_FALSE(detail::is_bound_by_host(1.0, 0.0));
}

Tensor forward(const Tensor& x) { return x.sin().exp().sum(); }

// The time of a step without any recording.
double seconds_of_step(const Tensor& x) {
  const c10::impl::VirtualGuardImpl guard(accelerator().type());
  const auto wait = [&] { guard.synchronizeStream(guard.getStream(accelerator())); };
  wait();
  const double began = sim_device::host_seconds();
  forward(x).backward();
  wait();
  x.mutable_grad().reset();
  return sim_device::host_seconds() - began;
}

// The device is idle when each operator begins, and its events show the host's calls. The host takes most of the time,
// but the device works in more than half of it.
TEST(OperatorClock, MeasuresKernelsThoughTheDeviceWaitsForTheHost) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const sim_device::HostPace pace(1.5 * sim_device::kOperatorSeconds);
  const Tensor x = leaf({16});
  const plan::Profile profile = detail::profile_step([&] { return forward(x); });
  for (const plan::Operator& op : profile.operators) {
    EXPECT_EQ(op.seconds, sim_device::kOperatorSeconds) << op.name;
  }
  EXPECT_GT(profile.host_seconds, 0);
  EXPECT_EQ(profile.plain_seconds(), seconds_of_step(x));
}

TEST(OperatorClock, GivesAProfileTheTimesOfAHostThatSetsThePace) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const Tensor x = leaf({16});
  {
    const sim_device::HostPace pace(4 * sim_device::kOperatorSeconds);
    const plan::Profile slow = detail::profile_step([&] { return forward(x); });
    for (const plan::Operator& op : slow.operators) {
      EXPECT_EQ(op.seconds, 4 * sim_device::kOperatorSeconds) << op.name;
    }
    EXPECT_EQ(slow.plain_seconds(), seconds_of_step(x));
    EXPECT_EQ(slow.plain_seconds(), plan::Simulator(slow).run(plan::keep_all(slow)).seconds);
  }
  const plan::Profile fast = detail::profile_step([&] { return forward(x); });
  for (const plan::Operator& op : fast.operators) {
    EXPECT_EQ(op.seconds, sim_device::kOperatorSeconds) << op.name;
  }
  EXPECT_EQ(fast.host_seconds, 0) << "the host works while the device does";
}

}  // namespace
}  // namespace snug::operator_clock_test
