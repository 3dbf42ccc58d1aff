#include "snug/grad_scaler.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/lazy_gradient.h"
#include "tests/support/tensors.h"

namespace snug::grad_scaler_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One parameter [1, 2] under plain SGD with lr 1, so that a step subtracts the gradient.
struct Trained {
  Tensor p = torch::tensor({1.0f, 2.0f}, torch::requires_grad());
  torch::optim::SGD optimizer{std::vector<Tensor>{p}, torch::optim::SGDOptions(1.0)};

  void set_gradient(float a, float b) { p.mutable_grad() = torch::tensor({a, b}); }
  /// The gradient that backward leaves for a true gradient of (a, b).
  void set_scaled_gradient(const GradScaler& scaler, float a, float b) {
    const auto scale = static_cast<float>(scaler.get_scale());
    set_gradient(a * scale, b * scale);
  }
  bool is(float a, float b) const { return torch::equal(p, torch::tensor({a, b})); }
};

/// A scaler that has scaled once already, as after the first loss.
GradScaler warm(GradScalerOptions options = {}) {
  GradScaler scaler(options);
  scaler.scale(torch::ones({}));
  return scaler;
}

TEST(GradScaler, HasPythonsDefaults) {
  const GradScalerOptions o = GradScaler().options();
  EXPECT_EQ(o.init_scale, 65536.0);
  EXPECT_EQ(o.growth_factor, 2.0);
  EXPECT_EQ(o.backoff_factor, 0.5);
  EXPECT_EQ(o.growth_interval, 2000);
  EXPECT_TRUE(o.enabled);
}

TEST(GradScaler, RefusesOptionsThatCannotWork) {
  const auto message = [](const GradScalerOptions& o) { return error_of<ConfigError>([&] { GradScaler scaler(o); }); };
  EXPECT_THAT(message({.init_scale = 0}), HasSubstr("init_scale is 0"));
  EXPECT_THAT(message({.init_scale = kNan}), HasSubstr("init_scale is nan"));
  EXPECT_THAT(message({.init_scale = kInf}), HasSubstr("init_scale is inf"));
  EXPECT_THAT(message({.init_scale = 1e39}), HasSubstr("init_scale is 1e+39")) << "infinite in FP32";
  EXPECT_THAT(message({.growth_factor = 1.0}), HasSubstr("growth_factor is 1"));
  EXPECT_THAT(message({.backoff_factor = 1.0}), HasSubstr("backoff_factor is 1"));
  EXPECT_THAT(message({.backoff_factor = 0.0}), HasSubstr("backoff_factor is 0"));
  EXPECT_THAT(message({.growth_interval = 0}), HasSubstr("growth_interval is 0"));
}

TEST(GradScaler, ScalesALossAndItsGradient) {
  GradScaler scaler({.init_scale = 8});
  const Tensor x = torch::tensor(3.0f, torch::requires_grad());
  const Tensor scaled = scaler.scale(x * x);
  EXPECT_EQ(scaled.item<float>(), 72.0f);
  scaled.backward();
  EXPECT_EQ(x.grad().item<float>(), 48.0f);
}

TEST(GradScaler, ScalesAListAndKeepsEachDtype) {
  GradScaler scaler({.init_scale = 4});
  const auto scaled =
      scaler.scale(std::vector{torch::ones({2}), torch::ones({}, torch::kHalf), torch::ones({3}, torch::kDouble)});
  ASSERT_EQ(scaled.size(), 3u);
  EXPECT_TRUE(same_bits(scaled[0], torch::full({2}, 4.0f)));
  EXPECT_TRUE(same_bits(scaled[2], torch::full({3}, 4.0, torch::kDouble)));
  EXPECT_EQ(scaled[1].item<float>(), 4.0f);
}

TEST(GradScaler, UnscalesInPlaceAndExactlyForPowersOfTwo) {
  Trained t;
  GradScaler scaler = warm();
  t.set_scaled_gradient(scaler, 0.3f, -7.0f);
  const Tensor gradient = t.p.grad();
  scaler.unscale_(t.optimizer);
  EXPECT_TRUE(gradient.is_same(t.p.grad()));
  EXPECT_TRUE(torch::equal(t.p.grad(), torch::tensor({0.3f, -7.0f})));
}

TEST(GradScaler, StepsWithTheUnscaledGradientWhetherUnscaledBeforeOrNot) {
  for (const bool unscale_before : {false, true}) {
    Trained t;
    GradScaler scaler = warm();
    t.set_scaled_gradient(scaler, 0.5f, 0.25f);
    if (unscale_before) {
      scaler.unscale_(t.optimizer);
    }
    const bool stepped = scaler.step(t.optimizer);
    EXPECT_TRUE(stepped);
    EXPECT_TRUE(t.is(0.5f, 1.75f));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 65536.0);
  }
}

TEST(GradScaler, HalvesTheScaleAndSkipsTheStepOnAGradientThatIsNotFinite) {
  for (const float bad : {kInf, -kInf, kNan}) {
    Trained t;
    GradScaler scaler = warm();
    t.set_gradient(1.0f, bad);
    const bool stepped = scaler.step(t.optimizer);
    EXPECT_FALSE(stepped);
    EXPECT_TRUE(t.is(1.0f, 2.0f));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768.0);
  }
}

TEST(GradScaler, GrowsAfterTheIntervalOfGoodStepsInARowAndASkipStartsTheCountAgain) {
  GradScaler scaler = warm({.init_scale = 64, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  std::vector<double> scales;
  for (const char kind : std::string("gggggbgggbbgg")) {
    Trained t;
    t.set_gradient(kind == 'b' ? kInf : 1.0f, 1.0f);
    EXPECT_EQ(static_cast<bool>(scaler.step(t.optimizer)), kind == 'g');
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{64, 64, 256, 256, 256, 64, 64, 64, 256, 64, 16, 16, 16}));
}

TEST(GradScaler, DoesNotGrowPastTheLargestFloat) {
  const double top = std::ldexp(1.0, 127);
  GradScaler scaler = warm({.init_scale = top, .growth_interval = 1});
  Trained t;
  t.set_gradient(1.0f, 1.0f);
  scaler.step(t.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), top);
  EXPECT_EQ(scaler.state_dict().get<int64_t>("_growth_tracker"), 0);
}

TEST(GradScaler, SkipsForEachOptimizerByItselfButHasOneScale) {
  Trained a, b, c;
  GradScaler scaler = warm();
  a.set_scaled_gradient(scaler, 0.5f, 0.5f);
  b.set_gradient(kNan, 1.0f);
  c.set_scaled_gradient(scaler, 0.25f, 0.25f);
  scaler.unscale_(c.optimizer);
  EXPECT_TRUE(scaler.step(a.optimizer));
  EXPECT_FALSE(scaler.step(b.optimizer));
  EXPECT_TRUE(scaler.step(c.optimizer));
  scaler.update();
  EXPECT_TRUE(a.is(0.5f, 1.5f));
  EXPECT_TRUE(b.is(1.0f, 2.0f));
  EXPECT_TRUE(c.is(0.75f, 1.75f));
  EXPECT_EQ(scaler.get_scale(), 32768.0);
}

// Real programs have unscaled group 0 once more for every further group.
TEST(GradScaler, UnscalesEveryParameterGroupOnce) {
  const Tensor p = torch::zeros({1}, torch::requires_grad());
  const Tensor q = torch::zeros({1}, torch::requires_grad());
  const Tensor r = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD optimizer(std::vector<torch::optim::OptimizerParamGroup>{{{p}}, {{q}}, {{r}}},
                              torch::optim::SGDOptions(1.0));
  GradScaler scaler = warm();
  for (const Tensor& parameter : {p, q, r}) {
    parameter.mutable_grad() = torch::full({1}, 65536.0f * 3);
  }
  scaler.unscale_(optimizer);
  for (const Tensor& parameter : {p, q, r}) {
    EXPECT_EQ(parameter.grad().item<float>(), 3.0f);
  }
}

// parameters() of a model with a shared module names its tensors twice; there is one gradient all the same.
TEST(GradScaler, UnscalesTheGradientOfAParameterThatIsGivenTwiceOnce) {
  const Tensor p = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD optimizer(std::vector{p, p}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = warm();
  p.mutable_grad() = torch::full({1}, 65536.0f * 3);
  scaler.unscale_(optimizer);
  EXPECT_EQ(p.grad().item<float>(), 3.0f);
}

TEST(GradScaler, PassesOverParametersWithoutAGradient) {
  const Tensor p = torch::ones({1}, torch::requires_grad());
  const Tensor unused = torch::ones({1}, torch::requires_grad());
  torch::optim::SGD optimizer(std::vector{unused, p}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = warm();
  p.mutable_grad() = torch::full({1}, 65536.0f);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(p.item<float>(), 0.0f);
  EXPECT_EQ(unused.item<float>(), 1.0f);
}

TEST(GradScaler, TakesGradientsInBFloat16AndDoubleAndSparseOnes) {
  for (const auto dtype : {torch::kBFloat16, torch::kDouble}) {
    const Tensor p = torch::ones({2}, dtype).requires_grad_();
    torch::optim::SGD optimizer(std::vector{p}, torch::optim::SGDOptions(1.0));
    GradScaler scaler = warm();
    p.mutable_grad() = torch::full({2}, 65536.0, dtype);
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_TRUE(torch::equal(p, torch::zeros({2}, dtype)));
  }
  GradScaler scaler({.init_scale = 1024});
  auto embedding = torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  torch::optim::SGD optimizer(embedding->parameters(), torch::optim::SGDOptions(1.0));
  const Tensor before = embedding->weight.detach().clone();
  scaler.scale(embedding->forward(torch::tensor({1, 1, 3})).sum()).backward();
  ASSERT_TRUE(embedding->weight.grad().is_sparse());
  EXPECT_TRUE(scaler.step(optimizer));
  Tensor expected = before.clone();
  expected[1].sub_(2);
  expected[3].sub_(1);
  EXPECT_TRUE(torch::equal(embedding->weight, expected));
}

TEST(GradScaler, FloatGradientsOf16BitWeightsAreAnErrorThatNamesTheParameter) {
  const Tensor fine = torch::ones({2}, torch::requires_grad());
  const Tensor half = torch::ones({2}, torch::kHalf).requires_grad_();
  torch::optim::SGD optimizer(std::vector{fine, half}, torch::optim::SGDOptions(1.0));
  fine.mutable_grad() = torch::ones({2});
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  GradScaler scaler = warm();
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(optimizer); }),
              AllOf(HasSubstr("parameter 1"), HasSubstr("FP16")));
  EXPECT_TRUE(torch::equal(fine.grad(), torch::ones({2}))) << "nothing may be unscaled when the call fails";
}

TEST(GradScaler, EveryCallOutOfOrderIsAnErrorThatSaysWhatToDo) {
  Trained t;
  t.set_gradient(1, 1);
  GradScaler cold;
  EXPECT_THAT(error_of<ConfigError>([&] { cold.scale(Tensor()); }), HasSubstr("output 0 of 1 is undefined"));
  EXPECT_THAT(error_of<ConfigError>([&] { cold.unscale_(t.optimizer); }), HasSubstr("nothing was scaled yet"));
  EXPECT_THAT(error_of<ConfigError>([&] { cold.step(t.optimizer); }), HasSubstr("nothing was scaled yet"));
  EXPECT_THAT(error_of<ConfigError>([&] { cold.update(); }), HasSubstr("nothing was scaled yet"));

  GradScaler scaler = warm();
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.update(); }), HasSubstr("no step() or unscale_() found a gradient"));
  scaler.unscale_(t.optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(t.optimizer); }), HasSubstr("called twice"));
  scaler.step(t.optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(t.optimizer); }), HasSubstr("called after step()"));
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.step(t.optimizer); }), HasSubstr("called twice"));
  scaler.update();
  EXPECT_NO_THROW(scaler.unscale_(t.optimizer)) << "a new round";
}

// As Python's fused optimizers, and its others.
TEST(GradScaler, AStepWithoutAnyGradientUpdatesNothingOrIsAnErrorAsInPython) {
  Trained t, with_gradient;
  AdamW aware({t.p});
  GradScaler scaler = warm();
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.step(t.optimizer); }),
              HasSubstr("no parameter of this optimizer has a gradient"));
  EXPECT_TRUE(scaler.step(aware));
  EXPECT_TRUE(t.is(1.0f, 2.0f));
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.update(); }), HasSubstr("found a gradient"));
  with_gradient.set_gradient(kInf, 1.0f);
  EXPECT_FALSE(scaler.step(with_gradient.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768.0);
}

TEST(GradScaler, AgreesAlsoWhereNoParameterHasAGradient) {
  Trained t;
  AdamW aware({t.p});
  GradScaler scaler = warm();
  int calls = 0;
  scaler.agree_by([&](const Tensor& found_inf) {
    ++calls;
    found_inf.fill_(1);  // another process has found something
  });
  EXPECT_FALSE(scaler.step(aware));
  scaler.update();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(scaler.get_scale(), 32768.0);
}

TEST(GradScaler, UnscalesAGradientWhoseMemoryHasTheNegative) {
  const Tensor p = testing::one();
  torch::optim::SGD optimizer(std::vector{p}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = warm({.init_scale = 2});
  testing::set_lazy_gradient(p);
  ASSERT_TRUE(p.grad().is_neg());
  scaler.unscale_(optimizer);
  EXPECT_FLOAT_EQ(p.grad().item<float>(), 0.35f);
}

TEST(GradScaler, UnscalingWithoutAnyGradientLeavesNothingToUpdateFor) {
  Trained t;
  GradScaler scaler = warm();
  scaler.unscale_(t.optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.update(); }), HasSubstr("found a gradient"));
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  scaler.cancel();
  t.set_scaled_gradient(scaler, 0.5f, 0.5f);
  EXPECT_TRUE(scaler.step(t.optimizer));
}

// A step that throws has not been made: with the gradients as they are it may be made again.
TEST(GradScaler, AStepThatThrewMayBeMadeAgainAndUnscalesOnce) {
  struct Failing : torch::optim::SGD {
    using SGD::SGD;
    bool fails = true;
    Tensor step(LossClosure closure) override {
      if (std::exchange(fails, false)) {
        throw std::runtime_error("no luck");
      }
      return SGD::step(std::move(closure));
    }
  };
  Trained t;
  Failing optimizer(std::vector<Tensor>{t.p}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = warm();
  t.set_scaled_gradient(scaler, 0.5f, 0.25f);
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(t.is(0.5f, 1.75f));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 65536.0);
}

TEST(GradScaler, WhicheverAllocationOfARoundFailsTheRoundCanBeGoneOnWith) {
  Tensor single = torch::tensor({1.0f, 2.0f}, torch::requires_grad());
  Tensor wide = torch::tensor({3.0}, torch::kDouble).requires_grad_();
  torch::optim::SGD optimizer(std::vector{single, wide}, torch::optim::SGDOptions(1.0));
  const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
    const auto make_or_repeat = [&](auto&& call) {
      if (allocation.stops(call)) {
        call();
      }
    };
    GradScaler scaler({.init_scale = 1024, .growth_interval = 1});
    make_or_repeat([&] { scaler.scale(torch::ones({})); });
    for (const Tensor& parameter : {single, wide}) {
      const torch::NoGradGuard no_grad;
      parameter.fill_(4);
      parameter.mutable_grad() = torch::full_like(parameter, 1024);
    }
    make_or_repeat([&] { scaler.unscale_(optimizer); });
    ASSERT_TRUE(torch::equal(single.grad(), torch::ones({2})));
    ASSERT_TRUE(torch::equal(wide.grad(), torch::ones({1}, torch::kDouble)));
    ASSERT_TRUE(scaler.step(optimizer));
    make_or_repeat([&] { scaler.update(); });
    ASSERT_EQ(scaler.get_scale(), 2048.0);
    ASSERT_TRUE(torch::equal(single, torch::full({2}, 3.0f)));
  });
  EXPECT_GE(failures, 3);
}

TEST(GradScaler, UpdateMaySetTheScaleAndLeavesTheGrowthCount) {
  Trained t;
  GradScaler scaler = warm({.growth_interval = 3});
  t.set_scaled_gradient(scaler, 1, 1);
  scaler.step(t.optimizer);
  scaler.update();
  scaler.update(512.0);
  EXPECT_EQ(scaler.get_scale(), 512.0);
  EXPECT_EQ(scaler.state_dict().get<int64_t>("_growth_tracker"), 1);
  for (const double bad : {0.0, -1.0, static_cast<double>(kNan), static_cast<double>(kInf)}) {
    EXPECT_THROW(scaler.update(bad), ConfigError) << bad;
  }
  scaler.update(torch::tensor({256.0}));
  for (const Tensor& bad : {Tensor(), torch::ones({2}), torch::zeros({1}), torch::ones({1}, torch::requires_grad())}) {
    EXPECT_THROW(scaler.update(bad), ConfigError) << bad;
  }
  EXPECT_EQ(scaler.get_scale(), 256.0);
}

TEST(GradScaler, CancelForgetsTheRoundAndKeepsTheScale) {
  Trained t;
  GradScaler scaler = warm();
  t.set_gradient(kInf, 1);
  scaler.unscale_(t.optimizer);
  scaler.cancel();
  EXPECT_THROW(scaler.update(), ConfigError) << "there is nothing to update for";
  t.set_scaled_gradient(scaler, 0.5f, 0.5f);
  EXPECT_TRUE(scaler.step(t.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 65536.0);
}

TEST(GradScaler, DisabledDoesNothingAndSteps) {
  Trained t;
  GradScaler scaler({.enabled = false});
  const Tensor loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_FALSE(scaler.is_enabled());
  t.set_gradient(0.5f, kInf);
  scaler.unscale_(t.optimizer);
  scaler.unscale_(t.optimizer);
  EXPECT_TRUE(scaler.step(t.optimizer));
  scaler.update();
  EXPECT_EQ(t.p[0].item<float>(), 0.5f);
  EXPECT_TRUE(std::isinf(t.p[1].item<float>())) << "a disabled scaler checks nothing";
  EXPECT_TRUE(scaler.state_dict().empty());
  EXPECT_NO_THROW(scaler.load_state_dict(warm().state_dict()));
  EXPECT_EQ(scaler.get_scale(), 1.0);
}

void good_step(GradScaler& scaler) {
  Trained t;
  t.set_scaled_gradient(scaler, 1, 1);
  scaler.step(t.optimizer);
  scaler.update();
}

TEST(GradScaler, StateGoesOnExactlyWhereItWasSaved) {
  GradScaler original = warm({.init_scale = 128, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 5});
  for (int i = 0; i < 3; ++i) {
    good_step(original);
  }
  const StateDict state = original.state_dict();
  EXPECT_EQ(state.size(), 5u);
  EXPECT_EQ(state.get<double>("scale"), 128.0);
  EXPECT_EQ(state.get<int64_t>("_growth_tracker"), 3);

  GradScaler cold;
  cold.load_state_dict(state);
  EXPECT_EQ(cold.get_scale(), 128.0) << "before anything is scaled";
  EXPECT_EQ(cold.state_dict().get<int64_t>("_growth_tracker"), 3);
  cold.scale(torch::ones({}));
  GradScaler hot = warm();
  good_step(hot);
  hot.load_state_dict(state);
  for (int i = 0; i < 8; ++i) {
    for (GradScaler* scaler : {&original, &cold, &hot}) {
      good_step(*scaler);
    }
    EXPECT_EQ(cold.get_scale(), original.get_scale()) << i;
    EXPECT_EQ(hot.get_scale(), original.get_scale()) << i;
  }
  EXPECT_EQ(original.get_scale(), 128.0 * 4 * 4);
}

TEST(GradScaler, RefusesAStateThatDoesNotFitAndKeepsItsOwn) {
  GradScaler scaler = warm();
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.load_state_dict({}); }), HasSubstr("the state is empty"));
  StateDict incomplete = scaler.state_dict();
  StateDict without_tracker;
  for (const auto& entry : incomplete.entries()) {
    if (entry.name != "_growth_tracker") {
      without_tracker.set(entry.name, entry.value);
    }
  }
  without_tracker.set("scale", 8.0);
  EXPECT_THROW(scaler.load_state_dict(without_tracker), CorruptFile);
  StateDict bad = scaler.state_dict();
  bad.set("scale", 8.0);
  bad.set("growth_factor", 0.5);
  EXPECT_THROW(scaler.load_state_dict(bad), ConfigError);
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  for (const int64_t tracker : {int64_t{-1}, int64_t{1} << 31}) {
    StateDict counted = scaler.state_dict();
    counted.set("scale", 8.0);
    counted.set("_growth_tracker", tracker);
    EXPECT_THAT(error_of<ConfigError>([&] { scaler.load_state_dict(counted); }), HasSubstr("_growth_tracker"));
  }
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  EXPECT_EQ(scaler.options().growth_factor, 2.0);
}

// As in Python nothing keeps the scale from halving away to nothing, from where it never grows again.
TEST(GradScaler, AScaleThatFellToZeroIsRefusedByLoading) {
  GradScaler scaler = warm({.init_scale = std::numeric_limits<float>::denorm_min(), .growth_interval = 1});
  Trained t;
  t.set_gradient(kInf, 0.0f);
  EXPECT_FALSE(scaler.step(t.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 0.0);
  GradScaler other;
  EXPECT_THAT(error_of<ConfigError>([&] { other.load_state_dict(scaler.state_dict()); }), HasSubstr("the scale is 0"));
}

static_assert(!std::is_copy_constructible_v<GradScaler> && !std::is_copy_assignable_v<GradScaler>,
              "copies would share one scale");

TEST(GradScaler, IsMovedWithItsScaleAndCount) {
  GradScaler first = warm({.init_scale = 128, .growth_interval = 2});
  good_step(first);
  GradScaler second = std::move(first);
  good_step(second);
  EXPECT_EQ(second.get_scale(), 256.0);
}

// A scale that has collapsed (to a subnormal number, say) must still load: the state is what it is.
TEST(GradScaler, LoadsTheSmallestScaleThereIs) {
  const double tiny = std::numeric_limits<float>::denorm_min();
  GradScaler scaler({.init_scale = tiny});
  GradScaler other;
  other.load_state_dict(scaler.state_dict());
  EXPECT_EQ(other.get_scale(), tiny);
}

}  // namespace
}  // namespace snug::grad_scaler_test
