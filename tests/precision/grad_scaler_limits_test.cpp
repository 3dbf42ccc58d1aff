// What GradScaler has beyond Python's: a static scale, a smallest scale, hysteresis and an end to endless skipping.

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/memory.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/peak_watch.h"
#include "src/precision/scaled_gradients.h"
#include "tests/support/reads_during.h"
#include "tests/support/tensors.h"

namespace snug::grad_scaler_limits_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::reads_during;
using testing::same_bits;
using torch::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One round with a gradient that is finite or not.
struct Rounds {
  GradScaler scaler;
  Tensor p = torch::ones({2}, torch::requires_grad());
  torch::optim::SGD optimizer{std::vector<Tensor>{p}, torch::optim::SGDOptions(0.0)};

  explicit Rounds(const GradScalerOptions& options) : scaler(options) { scaler.scale(torch::ones({})); }

  bool round(bool good) {
    p.mutable_grad() = torch::tensor({1.0f, good ? 1.0f : kInf});
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  }
  /// The scale after each round: 'g' a good one, 'b' a bad one.
  std::vector<double> scales(std::string_view rounds) {
    std::vector<double> result;
    for (const char kind : rounds) {
      EXPECT_EQ(round(kind == 'g'), kind == 'g');
      result.push_back(scaler.get_scale());
    }
    return result;
  }
};

/// Collects LibTorch's warnings while it lives.
class Warnings final : public c10::WarningHandler {
 public:
  Warnings() : previous_(c10::WarningUtils::get_warning_handler()) { c10::WarningUtils::set_warning_handler(this); }
  ~Warnings() override { c10::WarningUtils::set_warning_handler(previous_); }
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }

  std::vector<std::string> messages;

 private:
  c10::WarningHandler* previous_;
};

TEST(GradScalerLimits, AreOffByDefault) {
  const GradScalerOptions o = GradScaler().options();
  EXPECT_TRUE(o.dynamic);
  EXPECT_EQ(o.min_scale, 0.0);
  EXPECT_EQ(o.hysteresis, 1);
  EXPECT_EQ(o.max_consecutive_skips, 0);
}

TEST(GradScalerLimits, RefuseOptionsThatCannotWork) {
  const auto message = [](const GradScalerOptions& o) { return error_of<ConfigError>([&] { GradScaler scaler(o); }); };
  EXPECT_THAT(message({.min_scale = -1}), HasSubstr("min_scale is -1"));
  EXPECT_THAT(message({.min_scale = kNan}), HasSubstr("min_scale is nan"));
  EXPECT_THAT(message({.min_scale = 1e-50}), HasSubstr("min_scale is 1e-50")) << "zero in FP32";
  EXPECT_THAT(message({.init_scale = 8, .min_scale = 16}),
              AllOf(HasSubstr("min_scale is 16"), HasSubstr("init_scale, which is 8")));
  EXPECT_THAT(message({.hysteresis = 0}), HasSubstr("hysteresis is 0"));
  EXPECT_THAT(message({.hysteresis = int64_t{1} << 31}), HasSubstr("hysteresis is 2147483648"));
  EXPECT_THAT(message({.max_consecutive_skips = -1}), HasSubstr("max_consecutive_skips is -1"));
  EXPECT_NO_THROW(GradScaler({.init_scale = 8, .min_scale = 8}));
}

TEST(StaticScale, StaysWhateverTheStepsFindAndBadStepsAreSkipped) {
  Rounds rounds({.init_scale = 64, .growth_interval = 1, .dynamic = false});
  EXPECT_THAT(rounds.scales("ggbbg"), ElementsAre(64, 64, 64, 64, 64));
}

TEST(StaticScale, IsSetByUpdateAlone) {
  Rounds rounds({.init_scale = 64, .growth_interval = 1, .dynamic = false});
  rounds.scaler.update(128.0);
  EXPECT_THAT(rounds.scales("gb"), ElementsAre(128, 128));
}

// Multiplying by 2^K and by 2^-K is exact unless it overflows or underflows.
TEST(StaticScale, OfAPowerOfTwoGivesTheGradientsOfNoScalingToTheBit) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::GELU(),
                              torch::nn::LayerNorm(std::vector<int64_t>{32}), torch::nn::Linear(32, 4));
  const Tensor x = torch::randn({8, 16});
  const Tensor target = torch::randint(4, {8});
  const auto loss = [&] { return torch::cross_entropy_loss(model->forward(x), target); };
  loss().backward();
  const auto expected = testing::gradients_of(*model);
  for (const int exponent : {0, 1, 7, 16, 24, -10}) {
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    optimizer.zero_grad();
    GradScaler scaler({.init_scale = std::ldexp(1.0, exponent), .dynamic = false});
    scaler.scale(loss()).backward();
    scaler.unscale_(optimizer);
    EXPECT_TRUE(same_bits(testing::gradients_of(*model), expected)) << "2^" << exponent;
  }
}

TEST(StaticScale, ThatIsNoPowerOfTwoIsWarnedOfWithTheNearest) {
  Warnings warnings;
  GradScaler scaler({.init_scale = 1000, .dynamic = false});
  EXPECT_THAT(warnings.messages, ElementsAre(AllOf(HasSubstr("1000"), HasSubstr("1024"))));
  warnings.messages.clear();
  scaler.scale(torch::ones({}));
  scaler.update(2.5);
  EXPECT_THAT(warnings.messages, ElementsAre(AllOf(HasSubstr("2.5"), HasSubstr("nearest is 2"))));
  warnings.messages.clear();
  scaler.update(3.5);
  EXPECT_THAT(warnings.messages, ElementsAre(HasSubstr("nearest is 4")));
}

TEST(StaticScale, IsNotWarnedOfWhereItIsExactOrNotStatic) {
  const Warnings warnings;
  const GradScaler exact({.init_scale = 1024, .dynamic = false});
  const GradScaler fraction({.init_scale = 0.125, .dynamic = false});
  const GradScaler dynamic({.init_scale = 1000});
  const GradScaler disabled({.init_scale = 1000, .enabled = false, .dynamic = false});
  EXPECT_THAT(warnings.messages, IsEmpty());
}

TEST(MinScale, IsTheLowestTheScaleFallsTo) {
  Rounds rounds({.init_scale = 8, .growth_interval = 2, .min_scale = 3});
  EXPECT_THAT(rounds.scales("bbbggb"), ElementsAre(4, 3, 3, 3, 6, 3));
}

TEST(MinScale, IsWhatUpdateMaySetAtLeast) {
  Rounds rounds({.init_scale = 8, .min_scale = 2});
  EXPECT_THAT(error_of<ConfigError>([&] { rounds.scaler.update(1.0); }),
              AllOf(HasSubstr("new_scale is 1"), HasSubstr("min_scale, which is 2")));
  EXPECT_EQ(rounds.scaler.get_scale(), 8.0);
  rounds.scaler.update(2.0);
  EXPECT_EQ(rounds.scaler.get_scale(), 2.0);
}

// Below 2^-127 the inverse is infinite in FP32: every gradient becomes infinite or NaN though none was, as in Python.
TEST(MinScale, KeepsTheScaleFromWhereItsInverseIsInfinite) {
  const auto unscaled_by = [](const GradScalerOptions& options) {
    Rounds rounds(options);
    rounds.round(false);
    rounds.p.mutable_grad() = torch::full({2}, 1e-30f);
    rounds.scaler.unscale_(rounds.optimizer);
    return rounds.p.grad()[0].item<float>();
  };
  const double start = std::ldexp(1.0, -127);
  EXPECT_EQ(unscaled_by({.init_scale = start}), kInf);
  EXPECT_EQ(unscaled_by({.init_scale = start, .min_scale = start}), 1e-30f * std::ldexp(1.0f, 127));
}

TEST(MinScale, CuresAStateWhoseScaleHadFallenAway) {
  Rounds collapsed({.init_scale = std::numeric_limits<float>::denorm_min()});
  collapsed.round(false);
  ASSERT_EQ(collapsed.scaler.get_scale(), 0.0);
  GradScaler cured({.min_scale = 1});
  cured.load_state_dict(collapsed.scaler.state_dict());
  EXPECT_EQ(cured.get_scale(), 1.0);
}

TEST(Hysteresis, BacksOffOnlyOnceSoManyBadStepsHaveBeenSinceTheLastGrowth) {
  Rounds rounds({.init_scale = 64, .growth_interval = 3, .hysteresis = 2});
  EXPECT_THAT(rounds.scales("bb"), ElementsAre(64, 32));
  EXPECT_THAT(rounds.scales("bb"), ElementsAre(16, 8)) << "each further one, as nothing grew";
  EXPECT_THAT(rounds.scales("ggg"), ElementsAre(8, 8, 16)) << "growth allows one bad step again";
  EXPECT_THAT(rounds.scales("bgb"), ElementsAre(16, 16, 8)) << "good steps between do not, unless it grows";
}

TEST(Hysteresis, StillSkipsAndStartsTheCountOfGoodStepsAgain) {
  Rounds rounds({.init_scale = 64, .growth_interval = 2, .hysteresis = 5});
  EXPECT_THAT(rounds.scales("gbgg"), ElementsAre(64, 64, 64, 128));
}

TEST(Hysteresis, HoldsWithAMinScale) {
  Rounds rounds({.init_scale = 4, .growth_interval = 2, .min_scale = 2, .hysteresis = 2});
  EXPECT_THAT(rounds.scales("bbbggb"), ElementsAre(4, 2, 2, 2, 4, 4));
}

TEST(Hysteresis, GoesOnFromASavedState) {
  const GradScalerOptions options{.init_scale = 64, .hysteresis = 3};
  Rounds first(options);
  first.scales("b");
  const StateDict state = first.scaler.state_dict();
  EXPECT_EQ(state.size(), 6u);
  EXPECT_EQ(state.get<int64_t>("_hysteresis_tracker"), 2);
  Rounds warm(options);
  warm.scaler.load_state_dict(state);
  EXPECT_THAT(warm.scales("bb"), ElementsAre(64, 32));
  GradScaler cold(options);
  cold.load_state_dict(state);
  EXPECT_EQ(cold.state_dict().get<int64_t>("_hysteresis_tracker"), 2);
}

TEST(GradScalerLimits, LoadPythonsStateWhichDoesNotHaveTheirCounters) {
  Rounds python({.init_scale = 32});
  const StateDict state = python.scaler.state_dict();
  EXPECT_EQ(state.size(), 5u) << "a default scaler's state is Python's";
  Rounds ours({.hysteresis = 2, .max_consecutive_skips = 5});
  ours.scales("b");
  ours.scaler.load_state_dict(state);
  EXPECT_THAT(ours.scales("bb"), ElementsAre(32, 16)) << "hysteresis begins anew";
  EXPECT_EQ(ours.scaler.state_dict().get<int64_t>("_consecutive_skips"), 2);
}

// GradScaler(init_scale=1024, growth_factor=4) in Python saves these as integers, the scale before its first use.
TEST(GradScalerState, MayHoldIntegersAsPythonsDoes) {
  StateDict state;
  state.set("scale", int64_t{1024});
  state.set("growth_factor", int64_t{4});
  state.set("backoff_factor", 0.25);
  state.set("growth_interval", int64_t{7});
  state.set("_growth_tracker", int64_t{2});
  GradScaler scaler;
  scaler.load_state_dict(state);
  EXPECT_EQ(scaler.get_scale(), 1024);
  EXPECT_EQ(scaler.options().growth_factor, 4);
  state.set("scale", std::string("1024"));
  EXPECT_THROW(scaler.load_state_dict(state), CorruptFile);
}

TEST(GradScalerLimits, RefuseCountersThatCannotBe) {
  GradScaler scaler({.hysteresis = 2, .max_consecutive_skips = 2});
  for (const char* name : {"_hysteresis_tracker", "_consecutive_skips"}) {
    StateDict state = scaler.state_dict();
    state.set("scale", 8.0);
    state.set(name, int64_t{-1});
    EXPECT_THAT(error_of<ConfigError>([&] { scaler.load_state_dict(state); }), HasSubstr(name));
  }
  EXPECT_EQ(scaler.get_scale(), 65536.0);
}

TEST(GradScalerLimits, LetUpdateNotWaitForTheDeviceExceptToCountSkips) {
  const auto reads_with = [](const GradScalerOptions& options) {
    const Tensor p = torch::ones({2}, torch::requires_grad());
    AdamW optimizer({p});  // skips on the device
    GradScaler scaler(options);
    int reads = 0;
    for (const float value : {1.0f, kInf, kNan, 1.0f}) {
      scaler.scale(torch::ones({}));
      p.mutable_grad() = torch::full({2}, value);
      scaler.step(optimizer);
      reads += reads_during([&] { scaler.update(); });
    }
    return reads;
  };
  EXPECT_EQ(reads_with({}), 0);
  EXPECT_EQ(reads_with({.dynamic = false}), 0);
  EXPECT_EQ(reads_with({.growth_interval = 1, .min_scale = 1, .hysteresis = 2}), 0);
  EXPECT_EQ(reads_with({.max_consecutive_skips = 100}), 4);
}

TEST(MaxConsecutiveSkips, EndsTheRunAtTheLastAllowedSkipAndSaysWhoIsToBlame) {
  Rounds rounds({.init_scale = 64, .max_consecutive_skips = 3});
  EXPECT_THAT(rounds.scales("bbgbb"), ElementsAre(32, 16, 16, 8, 4)) << "a good step starts the count again";
  const std::string message = error_of<NonFinite>([&] { rounds.round(false); });
  EXPECT_THAT(message, AllOf(HasSubstr("3 steps in a row were skipped"), HasSubstr("at scale 4,"),
                             HasSubstr("parameter 0 of group 0 [2]"), HasSubstr("holds inf")));
  EXPECT_THAT(message, AllOf(HasSubstr("learning rate"), HasSubstr("clip"), HasSubstr("layer"), HasSubstr("bfloat16")));
  EXPECT_EQ(rounds.scaler.get_scale(), 2.0) << "the round is over";
  EXPECT_THROW(rounds.round(false), NonFinite) << "and the row goes on";
  EXPECT_TRUE(rounds.round(true));
  EXPECT_FALSE(rounds.round(false));
}

struct TwoGroups {
  Tensor a = torch::ones({1}, torch::requires_grad());
  Tensor b = torch::ones({2, 3}, torch::requires_grad());
  Tensor c = torch::ones({4}, torch::requires_grad());
  std::vector<torch::optim::OptimizerParamGroup> groups{torch::optim::OptimizerParamGroup({a}),
                                                        torch::optim::OptimizerParamGroup({b, c})};

  void set_gradients(float of_b, float of_c) {
    a.mutable_grad() = torch::ones({1});
    b.mutable_grad() = torch::ones({2, 3});
    b.mutable_grad()[1][2] = of_b;
    c.mutable_grad() = torch::full({4}, of_c);
  }
};

TEST(MaxConsecutiveSkips, NamesTheFirstParameterForBothKindsOfOptimizer) {
  const auto message_of = [](auto make, const std::vector<std::pair<std::string, Tensor>>& names, TwoGroups& t) {
    auto optimizer = make(t.groups);
    GradScaler scaler({.max_consecutive_skips = 1});
    scaler.name_parameters(names);
    scaler.scale(torch::ones({}));
    return error_of<NonFinite>([&] {
      EXPECT_FALSE(scaler.step(optimizer));
      scaler.update();
    });
  };
  const auto adamw = [](auto& groups) { return AdamW(groups); };
  const auto sgd = [](auto& groups) { return torch::optim::SGD(groups, torch::optim::SGDOptions(0.1)); };
  TwoGroups t;
  t.set_gradients(1, kNan);
  EXPECT_THAT(message_of(sgd, {}, t), AllOf(HasSubstr("parameter 1 of group 1 [4]"), HasSubstr("holds nan")));
  t.set_gradients(-kInf, kNan);
  EXPECT_THAT(message_of(adamw, {}, t), AllOf(HasSubstr("parameter 0 of group 1 [2, 3]"), HasSubstr("holds -inf")));
  EXPECT_THAT(message_of(adamw, {{"c", t.c}, {"blocks.1.weight", t.b}}, t), HasSubstr("'blocks.1.weight' [2, 3]"));
  EXPECT_THAT(message_of(sgd, {{"c", t.c}}, t), HasSubstr("parameter 0 of group 1 [2, 3]"));
}

// Clipping makes of one NaN a NaN in every gradient.
TEST(MaxConsecutiveSkips, BlamesTheOneThatWasBadBeforeClipping) {
  TwoGroups t;
  t.set_gradients(1, kNan);
  AdamW optimizer(t.groups);
  GradScaler scaler({.max_consecutive_skips = 1});
  scaler.scale(torch::ones({}));
  scaler.unscale_(optimizer);
  clip_grad_norm_({t.a, t.b, t.c}, 1.0);
  ASSERT_TRUE(std::isnan(t.a.grad().item<float>()));
  scaler.step(optimizer);
  EXPECT_THAT(error_of<NonFinite>([&] { scaler.update(); }), HasSubstr("parameter 1 of group 1 [4]"));
}

TEST(MaxConsecutiveSkips, LooksIntoSparseGradients) {
  auto embedding = torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  torch::optim::SGD optimizer(embedding->parameters(), torch::optim::SGDOptions(1.0));
  GradScaler scaler({.max_consecutive_skips = 1});
  scaler.scale(embedding->forward(torch::tensor({1, 3})).sum() * kInf).backward();
  scaler.step(optimizer);
  EXPECT_THAT(error_of<NonFinite>([&] { scaler.update(); }), HasSubstr("parameter 0 of group 0 [4, 2]"));
}

TEST(MaxConsecutiveSkips, CountsOnFromASavedState) {
  const GradScalerOptions options{.max_consecutive_skips = 3};
  Rounds first(options);
  first.scales("bb");
  Rounds second(options);
  second.scaler.load_state_dict(first.scaler.state_dict());
  EXPECT_THROW(second.round(false), NonFinite);
}

TEST(GradScalerNames, AreInTheErrorOfFp16Gradients) {
  const Tensor half = torch::ones({2}, torch::kHalf).requires_grad_();
  torch::optim::SGD optimizer(std::vector{half}, torch::optim::SGDOptions(1.0));
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  scaler.name_parameters({{"head.weight", half}});
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(optimizer); }),
              AllOf(HasSubstr("parameter 'head.weight' [2]"), HasSubstr("FP16")));
}

// Memory that runs out after a step would leave new weights with the old scale.
TEST(GradScalerUpdate, AllocatesNothingAfterTheStep) {
  for (const bool good : {true, false}) {
    Rounds rounds({.growth_interval = 1, .min_scale = 1, .hysteresis = 2});
    rounds.p.mutable_grad() = torch::tensor({1.0f, good ? 1.0f : kInf});
    rounds.scaler.step(rounds.optimizer);
    detail::fail_allocation_after(1);
    EXPECT_NO_THROW(rounds.scaler.update()) << good;
    detail::fail_allocation_after(0);
    EXPECT_EQ(rounds.scaler.get_scale(), good ? 131072 : 65536);
  }
}

// An optimizer that only looked at its gradients after the other's step counts too.
TEST(GradScalerUpdate, SeesWhatWasUnscaledAfterTheLastStep) {
  Rounds rounds({.init_scale = 4});
  const Tensor q = torch::ones({1}, torch::requires_grad());
  torch::optim::SGD second(std::vector{q}, torch::optim::SGDOptions(0.0));
  rounds.p.mutable_grad() = torch::ones({2});
  EXPECT_TRUE(rounds.scaler.step(rounds.optimizer));
  q.mutable_grad() = torch::full({1}, kNan);
  rounds.scaler.unscale_(second);
  rounds.scaler.update();
  EXPECT_EQ(rounds.scaler.get_scale(), 2);
}

// Two parts of the check, gaps at no place, and a layout that is not contiguous. The check allocates scalars alone.
TEST(CheckFinite, FindsOneBadValueWhereverItIs) {
  const Tensor p = torch::zeros({2, 3, 100, 101}, torch::requires_grad());
  const torch::optim::SGD optimizer(std::vector{p}, torch::optim::SGDOptions(0.0));
  for (const auto layout : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    p.mutable_grad() = torch::ones_like(p, layout);
    const Tensor values = p.grad().as_strided({p.numel()}, {1});
    const auto is_bad = [&] {
      const detail::PeakWatch watch(torch::kCPU);
      const int64_t before = live_bytes(torch::kCPU).count();
      const bool bad = detail::check_finite(detail::gradients_of(optimizer))[0].second.item<bool>();
      EXPECT_LT(watch.peak() - before, 1 << 10);
      return bad;
    };
    EXPECT_FALSE(is_bad());
    for (const float bad : {kInf, -kInf, kNan}) {
      for (const int64_t at : {int64_t{0}, int64_t{1}, p.numel() / 2, p.numel() - 1}) {
        values[at] = bad;
        EXPECT_TRUE(is_bad()) << bad << " at " << at;
        values[at] = std::numeric_limits<float>::max();
      }
    }
    EXPECT_FALSE(is_bad());
  }
}

}  // namespace
}  // namespace snug::grad_scaler_limits_test
