#include <memory>
#include <sstream>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

// AdamW given tensors that do not belong together. Its kernel walks raw memory, so each of these must be an error, and
// change nothing.

namespace snug::adamw_mismatch_test {
namespace {

using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::random_parameters;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using testing::train;
using torch::Tensor;
using torch::optim::OptimizerParamGroup;
using TorchOptions = torch::optim::AdamWOptions;

// The first parameter is in a group of its own, so that it would be updated before the second is looked at.
struct Trained {
  std::vector<Tensor> p = random_parameters();
  AdamW optimizer{std::vector<OptimizerParamGroup>{{{p[0]}}, {{p[1], p[2]}}}, {.lr = 0.1}};

  Trained() { train(optimizer, p, 1, 2); }

  /// The error of a step, after checking that the other parameters and all state are as before.
  std::string refusal() {
    const auto first = p[0].detach().clone();
    const auto third = p[2].detach().clone();
    const auto state = tensors_in(optimizer.state_dict());
    const auto message = error_of<ConfigError>([&] { optimizer.step(); });
    EXPECT_TRUE(same_bits(p[0], first));
    EXPECT_TRUE(same_bits(p[2], third));
    EXPECT_TRUE(same_bits(tensors_in(optimizer.state_dict()), state));
    return message;
  }
};

TEST(AdamWMismatch, AParameterThatWasConvertedAfterAStepIsAnError) {
  for (const auto dtype : {torch::kDouble, torch::kBFloat16}) {
    Trained t;
    t.p[1].set_data(t.p[1].detach().to(dtype));  // as module->to(dtype) does
    set_gradients(t.p, 3);
    EXPECT_THAT(t.refusal(), AllOf(HasSubstr("parameter 1"), HasSubstr(c10::toString(dtype))));
  }
}

TEST(AdamWMismatch, AParameterThatWasConvertedBeforeTheFirstStepIsTakenOrRefusedAsInTheConstructor) {
  auto p = random_parameters();
  AdamW optimizer(p);
  p[0].set_data(p[0].detach().to(torch::kDouble));
  train(optimizer, p, 1, 1);
  EXPECT_EQ(tensors_in(optimizer.state_dict())[1].scalar_type(), torch::kDouble);
  auto q = random_parameters();
  AdamW other(q);
  q[1].set_data(q[1].detach().to(torch::kBFloat16));
  set_gradients(q, 1);
  EXPECT_THAT(error_of<ConfigError>([&] { other.step(); }), AllOf(HasSubstr("parameter 1"), HasSubstr("BFloat16")));
}

TEST(AdamWMismatch, AParameterWhoseShapeOrLayoutChangedAfterAStepIsAnError) {
  Trained grown;
  grown.p[1].set_data(torch::ones({65}));
  set_gradients(grown.p, 3);
  EXPECT_THAT(grown.refusal(), AllOf(HasSubstr("parameter 1"), HasSubstr("[65]"), HasSubstr("[64]")));

  const Tensor matrix = torch::randn({4, 6}).requires_grad_();
  AdamW optimizer({matrix});
  train(optimizer, {matrix}, 1, 1);
  matrix.set_data(matrix.detach().t().contiguous().t());
  set_gradients({matrix}, 2);
  const Tensor before = matrix.detach().clone();
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }), HasSubstr("layout"));
  EXPECT_TRUE(torch::equal(matrix, before));
}

TEST(AdamWMismatch, AGroupThatIsAddedLaterIsCheckedToo) {
  Trained t;
  t.optimizer.add_param_group(OptimizerParamGroup({torch::ones({2}, torch::kBFloat16).requires_grad_()}));
  set_gradients(t.p, 3);
  t.optimizer.param_groups()[2].params()[0].mutable_grad() = torch::ones({2}, torch::kBFloat16);
  EXPECT_THAT(t.refusal(), AllOf(HasSubstr("parameter 3"), HasSubstr("BFloat16")));
}

TEST(AdamWMismatch, OptionsOfAnotherOptimizerThatAreSetLaterAreAnError) {
  Trained t;
  const StateDict state = t.optimizer.state_dict();
  t.optimizer.param_groups()[1].set_options(std::make_unique<torch::optim::SGDOptions>(0.1));
  set_gradients(t.p, 3);
  EXPECT_THAT(error_of<ConfigError>([&] { t.optimizer.step(); }), HasSubstr("options of another optimizer"));
  EXPECT_THAT(error_of<ConfigError>([&] { t.optimizer.state_dict(); }), HasSubstr("options of another optimizer"));
  EXPECT_THAT(error_of<ConfigError>([&] { t.optimizer.load_state_dict(state); }),
              HasSubstr("options of another optimizer"));
}

TEST(AdamWMismatch, AnEmptyParameterIsNoTrouble) {
  const Tensor empty = torch::ones({0, 3}, torch::requires_grad());
  const Tensor p = torch::ones({2}, torch::requires_grad());
  const Tensor alone = torch::ones({2}, torch::requires_grad());
  AdamW optimizer({empty, p});
  AdamW reference({alone});
  train(optimizer, {empty, p}, 1, 1);
  alone.mutable_grad() = p.grad().clone();
  reference.step();
  EXPECT_TRUE(same_bits(p, alone));
}

// --- archives

std::string archive_of(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load(torch::optim::Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

TEST(AdamWArchive, ThatDoesNotFitIsAnErrorAndChangesNothing) {
  Trained t;
  const auto before = tensors_in(t.optimizer.state_dict());

  auto q = random_parameters();
  AdamW reordered(std::vector<OptimizerParamGroup>{{{q[2]}}, {{q[1], q[0]}}}, {.lr = 0.7});
  train(reordered, q, 1, 1);
  EXPECT_THAT(error_of<CorruptFile>([&] { load(t.optimizer, archive_of(reordered)); }),
              AllOf(HasSubstr("parameter 0"), HasSubstr("[5, 7]")));

  // The first group fits and the second does not: the first must not have been taken.
  AdamW fewer(std::vector<OptimizerParamGroup>{{{q[0]}}, {{q[1]}}}, {.lr = 0.7});
  train(fewer, q, 1, 1);
  EXPECT_THROW(load(t.optimizer, archive_of(fewer)), std::exception);

  torch::optim::AdamW torchs(std::vector<OptimizerParamGroup>{{{q[0]}}, {{q[1], q[2]}}}, TorchOptions(0.7));
  train(torchs, q, 1, 1);
  EXPECT_THROW(load(t.optimizer, archive_of(torchs)), std::exception) << "its state is not of the fused kind";

  EXPECT_TRUE(same_bits(tensors_in(t.optimizer.state_dict()), before));
  for (const auto& group : t.optimizer.param_groups()) {
    EXPECT_EQ(group.options().get_lr(), 0.1);
  }
}

TEST(AdamWArchive, FromBeforeTheFirstStepTakesTheStateAway) {
  auto p = random_parameters();
  AdamW optimizer(p);
  const std::string fresh = archive_of(optimizer);
  train(optimizer, p, 1, 2);
  load(optimizer, fresh);
  EXPECT_TRUE(tensors_in(optimizer.state_dict()).empty());
}

TEST(AdamWArchive, OfAnotherMemoryLayoutGoesOnToTheBit) {
  const Tensor start = torch::randn({2, 3, 4, 5});
  const Tensor plain = start.clone().requires_grad_();
  const Tensor last = start.contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
  AdamW a({plain}, {.lr = 0.1});
  AdamW b({last}, {.lr = 0.1});
  train(a, {plain}, 1, 2);
  {
    const torch::NoGradGuard no_grad;
    last.copy_(plain);
  }
  load(b, archive_of(a));
  train(a, {plain}, 3, 4);
  train(b, {last}, 3, 4);
  EXPECT_TRUE(same_bits(last, plain));
}

// --- states

TEST(AdamWState, WithTensorsThatCannotBeStateIsAnErrorAndChangesNothing) {
  Trained t;
  const auto before = tensors_in(t.optimizer.state_dict());
  const auto with = [&](const std::string& parameter, const std::string& name, const Tensor& tensor) {
    StateDict dict = t.optimizer.state_dict();
    StateDict states = dict.get<StateDict>("state");
    StateDict entry = states.contains(parameter) ? states.get<StateDict>(parameter) : states.get<StateDict>("0");
    entry.set(name, tensor);
    states.set(parameter, entry);
    dict.set("state", states);
    return error_of<CorruptFile>([&] { t.optimizer.load_state_dict(dict); });
  };
  EXPECT_THAT(with("1", "step", torch::empty({0})), AllOf(HasSubstr("step of parameter 1"), HasSubstr("[0]")));
  EXPECT_THAT(with("1", "step", torch::ones({64})), AllOf(HasSubstr("step of parameter 1"), HasSubstr("[64]")));
  EXPECT_THAT(with("2", "exp_avg_sq", torch::ones({1})),
              AllOf(HasSubstr("exp_avg_sq of parameter 2"), HasSubstr("[1]")));
  EXPECT_THAT(with("2", "exp_avg", Tensor()), HasSubstr("exp_avg of parameter 2"));
  EXPECT_THAT(with("3", "step", torch::ones({})), HasSubstr("of 4 parameters, of which this optimizer has 3"));
  EXPECT_TRUE(same_bits(tensors_in(t.optimizer.state_dict()), before));
}

TEST(AdamWState, WhicheverAllocationFailsInLoadingTheOldStateStays) {
  Trained source;
  train(source.optimizer, source.p, 3, 3);
  for (const bool as_archive : {false, true}) {
    Trained t;
    const auto before = tensors_in(t.optimizer.state_dict());
    const StateDict saved = source.optimizer.state_dict();
    const std::string archive = archive_of(source.optimizer);
    const auto load_again = [&] {
      if (as_archive) {
        load(t.optimizer, archive);
      } else {
        t.optimizer.load_state_dict(saved);
      }
    };
    const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
      const bool failed = allocation.stops(load_again);
      ASSERT_TRUE(same_bits(tensors_in(t.optimizer.state_dict()), failed ? before : tensors_in(saved)));
    });
    EXPECT_GE(failures, 9);
  }
}

// torch fills the fields that a group leaves at torch's defaults from the optimizer's options.
TEST(AdamW, AGroupThatOnlyTurnsDecayOffTakesTheOtherOptionsFromTheOptimizer) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  GTEST_SKIP() << "LibTorch gives groups the optimizer's options from 2.13 on";
#endif
  auto p = random_parameters();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p[0]}, std::make_unique<TorchOptions>(TorchOptions().weight_decay(0)));
  groups.emplace_back(std::vector{p[1], p[2]});
  AdamW optimizer(groups, {.lr = 0.25, .betas = {0.5, 0.999}, .weight_decay = 0.3});
  const auto& first = static_cast<const TorchOptions&>(optimizer.param_groups()[0].options());
  EXPECT_EQ(first.weight_decay(), 0);
  EXPECT_EQ(first.lr(), 0.25);
  EXPECT_EQ(std::get<0>(first.betas()), 0.5);
}

}  // namespace
}  // namespace snug::adamw_mismatch_test
