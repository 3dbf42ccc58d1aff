#include "snug/muon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/models/gpt.h"
#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/memory.h"
#include "snug/step_in_backward.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

namespace snug::muon_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using testing::train;
using torch::Tensor;

std::vector<Tensor> matrices() {
  torch::manual_seed(3);
  return {torch::randn({40, 24}).requires_grad_(), torch::randn({24, 40}).requires_grad_(),
          torch::randn({16, 16}).requires_grad_()};
}

TEST(Muon, MovesAMatrixByOneThatIsNearlyOrthogonal) {
  auto p = matrices();
  const auto before = clones_of(p);
  Muon optimizer(p, {.lr = 0.5, .weight_decay = 0});
  train(optimizer, p, 1, 1);
  for (size_t i = 0; i < p.size(); ++i) {
    const double rate =
        0.5 * std::sqrt(std::max(1.0, static_cast<double>(p[i].size(0)) / static_cast<double>(p[i].size(1))));
    const Tensor values = torch::linalg_svdvals((before[i] - p[i].detach()) / rate);
    EXPECT_GT(values.min().item<double>(), 0.3)
        << i;  // a Newton-Schulz of five steps leaves 0.5 to 1.5, and BF16 rounds
    EXPECT_LT(values.max().item<double>(), 1.6) << i;
  }
}

TEST(Muon, HasAMomentumInsteadOfTwoMomentsAndGoesOnFromIt) {
  auto p = matrices();
  Muon optimizer(p, {.lr = 0.1});
  train(optimizer, p, 1, 3);
  const auto state = tensors_in(optimizer.state_dict());
  ASSERT_EQ(state.size(), p.size());
  auto q = clones_of(p);
  for (Tensor& parameter : q) {
    parameter.requires_grad_();
  }
  Muon resumed(q, {.lr = 7, .nesterov = false, .match_rms_adamw = true});
  resumed.load_state_dict(optimizer.state_dict());
  train(optimizer, p, 4, 6);
  train(resumed, q, 4, 6);
  EXPECT_TRUE(same_bits(clones_of(p), clones_of(q)));
  EXPECT_TRUE(same_bits(tensors_in(optimizer.state_dict()), tensors_in(resumed.state_dict())));
}

TEST(Muon, UpdatesTheOtherParametersOfAModelAsAdamWDoes) {
  torch::manual_seed(1);
  const GptOptions options{.vocab = 50, .context = 16, .layers = 2, .heads = 2, .width = 32};
  Gpt model(options), by_adamw(options);
  {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : model->named_parameters()) {
      by_adamw->named_parameters()[parameter.key()].copy_(parameter.value());
    }
  }
  const auto groups = Muon::groups(*model, {.lr = 0.02}, {.lr = 3e-3});
  ASSERT_EQ(groups.size(), 2u);
  for (const Tensor& matrix : groups[0].params()) {
    EXPECT_EQ(matrix.dim(), 2);
    EXPECT_NE(matrix.size(0), options.vocab);
  }
  Muon optimizer(groups);
  std::vector<Tensor> others;
  const auto twins = by_adamw->named_parameters();
  for (const auto& parameter : model->named_parameters()) {
    for (const Tensor& other : groups[1].params()) {
      if (other.is_same(parameter.value())) {
        others.push_back(twins[parameter.key()]);
      }
    }
  }
  ASSERT_EQ(others.size(), groups[1].params().size());
  AdamW reference(others, {.lr = 3e-3});
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    set_gradients(groups[0].params(), seed);
    set_gradients(groups[1].params(), seed + 100);
    set_gradients(others, seed + 100);
    optimizer.step();
    reference.step();
  }
  EXPECT_TRUE(same_bits(clones_of(groups[1].params()), clones_of(others)));
  Muon loaded(Muon::groups(*by_adamw, {}, {}));
  loaded.load_state_dict(optimizer.state_dict());
  EXPECT_TRUE(same_bits(tensors_in(loaded.state_dict()), tensors_in(optimizer.state_dict())));
}

TEST(Muon, ASkippedStepLeavesNoTraceAndAScaleIsTakenOut) {
  const auto run = [](bool with_skips) {
    auto p = matrices();
    Muon optimizer(p, {.lr = 0.1});
    GradScaler scaler({.init_scale = 1024, .growth_interval = 1000, .enabled = true});
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      if (with_skips) {
        set_gradients(p, seed + 50);
        p[1].mutable_grad()[0][0] = std::numeric_limits<float>::infinity();
        scaler.scale(torch::ones({}));
        EXPECT_FALSE(scaler.step(optimizer));
        scaler.update(1024.0);
      }
      set_gradients(p, seed, 1024);
      scaler.scale(torch::ones({}));
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update(1024.0);
    }
    return clones_of(p);
  };
  const auto with_skips = run(true);
  EXPECT_TRUE(same_bits(run(false), with_skips));
  auto p = matrices();
  Muon optimizer(p, {.lr = 0.1});
  train(optimizer, p, 1, 4);
  EXPECT_TRUE(same_bits(clones_of(p), with_skips));  // 1024 is a power of two
}

TEST(Muon, WhereThereIsTooLittleMemoryAllIsOldAndTheStepCanBeMadeAgain) {
  auto p = matrices();
  Muon reference(p, {.lr = 0.1});
  train(reference, p, 1, 2);
  auto q = matrices();
  Muon optimizer(q, {.lr = 0.1});
  train(optimizer, q, 1, 1);
  const auto old_parameters = clones_of(q), old_state = tensors_in(optimizer.state_dict());
  set_gradients(q, 2);
  const c10::Device cpu(c10::kCPU);
  int failures = 0;
  for (int64_t room = 0; !HasFailure(); room += 256) {
    try {
      const MemoryLimit limit(cpu, Bytes(live_bytes(cpu).count() + room));
      optimizer.step();
    } catch (const c10::OutOfMemoryError&) {
      ++failures;
      ASSERT_TRUE(same_bits(clones_of(q), old_parameters)) << room;
      ASSERT_TRUE(same_bits(tensors_in(optimizer.state_dict()), old_state)) << room;
      continue;
    }
    EXPECT_GE(room + 256, optimizer.workspace_bytes());
    break;
  }
  EXPECT_GE(failures, 20);
  EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
}

TEST(Muon, UpdatesWhileBackwardRuns) {
  const auto run = [](bool early) {
    auto p = matrices();
    Muon optimizer(p, {.lr = 0.1});
    std::optional<StepInBackward> in_backward;
    if (early) {
      in_backward.emplace(optimizer);
    }
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      (p[0].mm(p[1]).mm(p[0].mm(p[2].sum().view({1, 1}).expand({24, 1})))).square().sum().backward();
      if (!early) {
        optimizer.step();
      }
    }
    return clones_of(p);
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST(Muon, RefusesWhatIsNoMatrixAndOptionsOutOfRange) {
  const auto vector = torch::zeros({3}, torch::requires_grad());
  EXPECT_THAT(error_of<ConfigError>([&] { Muon({vector}); }), HasSubstr("1 dimensions"));
  EXPECT_THAT(error_of<ConfigError>([&] { Muon(matrices(), {.ns_steps = 100}); }), HasSubstr("ns_steps is 100"));
  EXPECT_THAT(error_of<ConfigError>([&] { Muon(matrices(), {.momentum = -1}); }), HasSubstr("momentum is -1"));
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
  EXPECT_THAT(error_of<ConfigError>([&] { Muon::groups(*norm); }), HasSubstr("no trained matrices"));
  EXPECT_EQ(Muon(matrices()).shard_multiple(), 0);
}

TEST(Muon, AGroupThatIsAddedKeepsItsOptionsAndIsCheckedAsInTheConstructor) {
  using torch::optim::OptimizerParamGroup;
  const auto matrix = [] { return torch::randn({8, 8}).requires_grad_(); };
  const Tensor by_adamw = matrix(), fast = matrix();
  Muon optimizer(std::vector{matrix()}, {.lr = 0.02});
  optimizer.add_param_group(OptimizerParamGroup({by_adamw}, std::make_unique<torch::optim::AdamWOptions>(3e-4)));
  optimizer.add_param_group(OptimizerParamGroup({fast}, std::make_unique<MuonGroup>(MuonOptions{.lr = 0.5})));
  optimizer.add_param_group(OptimizerParamGroup(std::vector{matrix()}));
  const auto rate = [&](size_t group) { return optimizer.param_groups()[group].options().get_lr(); };
  EXPECT_EQ(rate(1), 3e-4);
  EXPECT_EQ(rate(2), 0.5);
  EXPECT_EQ(rate(3), 0.02);
  train(optimizer, {by_adamw}, 1, 1);
  const auto state = optimizer.state_dict().get<StateDict>("state");
  EXPECT_TRUE(state.get<StateDict>("1").contains("exp_avg"));

  const auto refused = [&](std::vector<Tensor> parameters, std::unique_ptr<torch::optim::OptimizerOptions> options) {
    return error_of<ConfigError>(
        [&] { optimizer.add_param_group(OptimizerParamGroup(std::move(parameters), std::move(options))); });
  };
  EXPECT_THAT(refused({matrix()}, std::make_unique<torch::optim::SGDOptions>(0.1)), HasSubstr("another optimizer"));
  EXPECT_THAT(refused({torch::zeros({3}, torch::requires_grad())}, std::make_unique<MuonGroup>()),
              HasSubstr("1 dimensions"));
  EXPECT_THAT(refused({fast}, std::make_unique<MuonGroup>()), HasSubstr("twice"));
  EXPECT_EQ(optimizer.param_groups().size(), 4u) << "a refused group is not there";
}

TEST(Muon, KeepsItsStateInMemory) {
  Muon optimizer(matrices());
  EXPECT_FALSE(optimizer.keep_state_in(StateFile()));
  EXPECT_EQ(optimizer.state_placement(), StatePlacement(StateOnDevice()));
  EXPECT_EQ(optimizer.bytes_with_state_in(StateFile()), MovableState::PlacementBytes());
}

}  // namespace
}  // namespace snug::muon_test
