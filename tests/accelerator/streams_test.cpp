// Models that compute on two streams of an accelerator, under a plan.

#include <optional>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/plan.h"
#include "src/planner/simulator.h"
#include "src/remat/profile_step.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/planned_step.h"
#include "tests/support/tensors.h"

namespace snug::streams_test {
namespace {

using plan::Simulator;
using plan::Stay;
using plan::Stays;
using sim_device::LazyStreams;
using testing::accelerator;
using testing::leaf;
using testing::same_bits;
using torch::Tensor;

void wait_for(const c10::Stream& earlier, const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(earlier);
  event.block(stream);
}

struct TwoStreams {
  c10::impl::VirtualGuardImpl streams{accelerator().type()};
  c10::Stream main = streams.getStream(accelerator());
  c10::Stream side = streams.getStreamFromGlobalPool(accelerator());

  // On the side stream, in order with the other one.
  template <typename F>
  Tensor beside(const Tensor& x, const F& function) const {
    wait_for(main, side);
    Tensor y;
    {
      const c10::StreamGuard on_side(side);
      y = function(x);
    }
    x.record_stream(side);
    y.record_stream(main);
    return y;
  }
};

// Both streams save the same result. In backward the side stream asks first.
Tensor loss_of_both(const TwoStreams& two, const Tensor& x) {
  const Tensor shared = x * 2;
  const Tensor a = shared.sin();
  const Tensor b = two.beside(shared, [](const Tensor& t) { return t.cos(); });
  wait_for(two.side, two.main);
  return (a + b).sum();
}

Tensor gradient_under(const std::optional<ActivationPlan>& plan, const TwoStreams& two, const Tensor& x) {
  x.mutable_grad().reset();
  std::optional<Rematerialize> scope;
  if (plan) {
    scope.emplace(*plan);
  }
  const Tensor loss = loss_of_both(two, x);
  scope.reset();
  loss.backward();
  return x.grad().cpu();
}

TEST(PlansOnTwoStreams, GiveOneWhatWasRebuiltOnTheOther) {
  const TwoStreams two;
  const Tensor x = leaf({1 << 12});
  const Tensor expected = gradient_under(std::nullopt, two, x);
  const plan::Profile profile = detail::profile_step([&] { return loss_of_both(two, x); });
  const Simulator simulator(profile);
  const Stays rebuilt_once(profile.storages.size(), Stay::once_rebuilt());
  const ActivationPlan plan = *testing::plan_of(simulator, rebuilt_once);
  const LazyStreams lazy;
  EXPECT_TRUE(same_bits(gradient_under(std::nullopt, two, x), expected));
  EXPECT_TRUE(same_bits(gradient_under(plan, two, x), expected));
}

// The memory that a side stream reads is free for the main stream's next tensor when that has been read.
Tensor loss_of_short_lived(const TwoStreams& two, const Tensor& x) {
  Tensor source = x.detach() + 1;
  const Tensor read = two.beside(source, [](const Tensor& t) { return t * 3; });
  source.reset();
  const Tensor next = torch::full_like(x.detach(), 100.0f);
  wait_for(two.side, two.main);
  return (x * read * next).sum();
}

TEST(PlansOnTwoStreams, LeaveMemoryToItsReadersWhileAStepIsProfiled) {
  const TwoStreams two;
  const Tensor x = leaf({1 << 12});
  const float expected = loss_of_short_lived(two, x).item<float>();
  const LazyStreams lazy;
  EXPECT_EQ(loss_of_short_lived(two, x).item<float>(), expected);
  detail::profile_step([&] {
    const Tensor loss = loss_of_short_lived(two, x);
    EXPECT_EQ(loss.item<float>(), expected);
    return loss;
  });
}

}  // namespace
}  // namespace snug::streams_test
