// Parameters that the forward pass itself makes or writes. Planning calls it several times: some it puts back, others
// it refuses.

#include <functional>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/tensors.h"

namespace snug::initialised_parameters_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kRows = 64, kWidth = 16;

// Two layers, whose result is brought to unit variance by `scale`, as in Glow.
struct Scaled {
  Tensor loss() {
    const Tensor h = x.mm(weight);
    if (!is_initialised || writes_always) {
      const torch::NoGradGuard no_grad;
      const Tensor values = 1 / h.std(0);
      if (is_exchanged) {
        scale.set_data(values);
      } else {
        scale.copy_(values);
      }
    }
    is_initialised = true;
    return (h * scale).tanh().square().mean();
  }
  std::string error_of_planning(Bytes memory = Bytes::unlimited()) {
    return error_of<ConfigError>([&] { detail::profile_step([&] { return loss(); }, {.memory = memory}); });
  }

  Tensor x = torch::randn({kRows, kWidth});
  Tensor weight = torch::randn({kWidth, kWidth}).requires_grad_();
  Tensor scale = torch::ones({kWidth}).requires_grad_();
  bool is_exchanged = false, writes_always = false, is_initialised = false;
};

TEST(InitialisedParameters, WhatEachForwardPassWritesToAParameterIsPutBack) {
  Scaled model{.writes_always = true};
  plan_activations([&] { return model.loss(); }, Bytes::unlimited());
  EXPECT_TRUE(torch::equal(model.scale, torch::ones({kWidth})));
}

TEST(InitialisedParameters, OneThatOnlyTheFirstForwardPassWritesIsAnError) {
  EXPECT_THAT(Scaled{}.error_of_planning(), AllOf(HasSubstr("writes in place to a parameter of sizes [16]"),
                                                  HasSubstr("Call it once before you plan")));
}

TEST(InitialisedParameters, OneThatTheFirstForwardPassGivesOtherMemoryIsAnError) {
  EXPECT_THAT(Scaled{.is_exchanged = true}.error_of_planning(),
              HasSubstr("makes the values (as by set_data) of a parameter of sizes [16]"));
}

TEST(InitialisedParameters, OneThatAFirstForwardPassWithoutRoomInitialisesIsAnErrorToo) {
  for (const bool is_exchanged : {false, true}) {
    EXPECT_THAT(Scaled{.is_exchanged = is_exchanged}.error_of_planning(Bytes(kRows * kWidth * 9)),
                HasSubstr("a parameter of sizes [16]"));
  }
}

// As recurrent layers of cuDNN do with theirs, to find out whether they lie one behind the other.
TEST(InitialisedParameters, OneWhoseMemoryIsLookedAtBeforeItIsReadIsNotMadeByThat) {
  const Tensor x = torch::randn({kRows, kWidth});
  Tensor weight = torch::randn({kWidth, kWidth}).requires_grad_();
  const auto forward = [&] {
    const Tensor memory = torch::empty({0}).set_(weight.storage(), 0, {kWidth, kWidth}, {kWidth, 1});
    return (x.mm(memory).detach() + x.mm(weight).tanh().sigmoid()).square().mean();
  };
  forward().backward();
  const Tensor expected = std::exchange(weight.mutable_grad(), Tensor());
  const plan::Profile profile = detail::profile_step(forward);
  for (const plan::Operator& op : profile.operators) {
    EXPECT_NE(op.name, plan::kOtherWrite) << "set_() changes no memory";
  }
  {
    const Rematerialize plan(detail::plan_activations(profile, forward, testing::smallest_feasible(profile)));
    forward().backward();
  }
  EXPECT_TRUE(torch::equal(weight.grad(), expected));
}

TEST(InitialisedParameters, OneOfALazyModuleIsAnError) {
  const Tensor x = torch::randn({kRows, kWidth});
  Tensor weight;
  const auto forward = [&] {
    if (!weight.defined()) {
      weight = torch::randn({x.size(1), kWidth}).requires_grad_();
    }
    return x.mm(weight).tanh().square().mean();
  };
  EXPECT_THAT(error_of<ConfigError>([&] { detail::profile_step(forward); }),
              HasSubstr("a parameter of sizes [16, 16]"));
  EXPECT_NO_THROW(detail::profile_step(forward));
}

TEST(InitialisedParameters, OnesThatWereInitialisedBeforeAndLeavesOfEachForwardPassArePlannedFor) {
  Scaled model{.is_exchanged = true};
  model.loss();
  Tensor leaf;
  const auto forward = [&] {
    leaf = model.x.clone().requires_grad_();
    return model.loss() + leaf.square().mean();
  };
  EXPECT_NO_THROW(plan_activations(forward, Bytes::unlimited()));
}

}  // namespace
}  // namespace snug::initialised_parameters_test
