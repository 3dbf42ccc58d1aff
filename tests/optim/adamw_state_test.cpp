#include <sstream>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

// AdamW saved and loaded, as a StateDict and as torch's archive.

namespace snug::adamw_state_test {
namespace {

using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::random_parameters;
using testing::same_bits;
using testing::tensors_in;
using testing::train;
using torch::Tensor;
using torch::optim::OptimizerParamGroup;

TEST(AdamWState, StateThatIsSavedAndLoadedGoesOnToTheBit) {
  auto p = random_parameters();
  AdamW original(p, {.lr = 0.05, .weight_decay = 0.3});
  train(original, p, 1, 3);

  auto q = random_parameters();
  for (size_t i = 0; i < p.size(); ++i) {
    const torch::NoGradGuard no_grad;
    q[i].copy_(p[i]);
  }
  AdamW resumed(q, {.lr = 0.9});  // the state brings the options, too
  resumed.load_state_dict(original.state_dict());
  EXPECT_TRUE(same_bits(tensors_in(resumed.state_dict()), tensors_in(original.state_dict())));
  train(original, p, 4, 8);
  train(resumed, q, 4, 8);
  EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
  EXPECT_TRUE(same_bits(tensors_in(resumed.state_dict()), tensors_in(original.state_dict())));
}

TEST(AdamWState, StateHasPythonsLayout) {
  auto p = random_parameters();
  AdamW optimizer(p, {.lr = 0.05});
  EXPECT_EQ(optimizer.state_dict().get<StateDict>("state").size(), 0u) << "before the first step";
  train(optimizer, p, 1, 2);
  const StateDict state = optimizer.state_dict();
  const auto& second = state.get<StateDict>("state").get<StateDict>("1");
  EXPECT_EQ(second.get<Tensor>("step").item<float>(), 2);
  EXPECT_EQ(second.get<Tensor>("exp_avg").sizes(), p[1].sizes());
  EXPECT_EQ(second.get<Tensor>("exp_avg_sq").sizes(), p[1].sizes());
  const auto& group = state.get<StateDict>("param_groups").get<StateDict>("0");
  EXPECT_EQ(group.get<double>("lr"), 0.05);
  EXPECT_EQ(group.get<StateDict>("betas").get<double>("0"), 0.9);
  EXPECT_EQ(group.get<StateDict>("betas").get<double>("1"), 0.999);
  EXPECT_EQ(group.get<StateDict>("params").get<int64_t>("2"), 2);
  EXPECT_EQ(group.get<double>("eps"), 1e-8);
  EXPECT_EQ(group.get<double>("weight_decay"), 0.01);
}

TEST(AdamWState, LoadingCopiesTheState) {
  auto p = random_parameters();
  auto q = random_parameters();
  AdamW a(p), b(q);
  train(a, p, 1, 2);
  b.load_state_dict(a.state_dict());
  const auto loaded = tensors_in(b.state_dict());
  train(a, p, 3, 3);
  EXPECT_TRUE(same_bits(tensors_in(b.state_dict()), loaded));
}

TEST(AdamWState, AStateThatDoesNotFitIsAnErrorAndChangesNothing) {
  auto p = random_parameters();
  AdamW optimizer(p);
  train(optimizer, p, 1, 2);
  const auto before = tensors_in(optimizer.state_dict());
  const auto message_for = [&](const StateDict& state) {
    return error_of<CorruptFile>([&] { optimizer.load_state_dict(state); });
  };

  auto q = random_parameters();
  AdamW fewer({q[0], q[1]});
  train(fewer, {q[0], q[1]}, 1, 1);
  EXPECT_THAT(message_for(fewer.state_dict()), AllOf(HasSubstr("2 parameters"), HasSubstr("3")));

  AdamW grouped(std::vector<OptimizerParamGroup>{{{q[0]}}, {{q[1], q[2]}}});
  EXPECT_THAT(message_for(grouped.state_dict()), HasSubstr("2 parameter groups"));

  AdamW reordered({q[1], q[0], q[2]}, {.lr = 0.7});
  train(reordered, q, 1, 1);
  EXPECT_THAT(message_for(reordered.state_dict()),
              AllOf(HasSubstr("parameter 0"), HasSubstr("[64]"), HasSubstr("[5, 7]")));

  StateDict no_moments = optimizer.state_dict();
  StateDict states = no_moments.get<StateDict>("state");
  states.set("1", StateDict());
  no_moments.set("state", states);
  EXPECT_THAT(message_for(no_moments), HasSubstr("step"));
  EXPECT_THAT(message_for(StateDict()), HasSubstr("state"));

  EXPECT_TRUE(same_bits(tensors_in(optimizer.state_dict()), before));
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3);
}

TEST(AdamWState, GoesThroughTorchsArchiveToTheBit) {
  auto p = random_parameters();
  AdamW original(p, {.lr = 0.05, .weight_decay = 0.3});
  train(original, p, 1, 3);
  std::stringstream stream;
  torch::save(original, stream);

  auto q = random_parameters();
  for (size_t i = 0; i < p.size(); ++i) {
    const torch::NoGradGuard no_grad;
    q[i].copy_(p[i]);
  }
  AdamW resumed(q);
  torch::load(resumed, stream);
  EXPECT_TRUE(same_bits(tensors_in(resumed.state_dict()), tensors_in(original.state_dict())));
  EXPECT_EQ(resumed.param_groups()[0].options().get_lr(), 0.05);
  train(original, p, 4, 6);
  train(resumed, q, 4, 6);
  EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
}

}  // namespace
}  // namespace snug::adamw_state_test
