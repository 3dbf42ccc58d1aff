#include "snug/extra/ema.h"

#include <cmath>
#include <stdexcept>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/memory.h"
#include "snug/schedule.h"
#include "snug/snapshot.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

namespace snug::ema_test {
namespace {

using testing::clones_of;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

std::vector<Tensor> random_parameters() {
  torch::manual_seed(5);
  std::vector<Tensor> parameters{torch::randn({4, 5}),
                                 torch::randn({3}, torch::kDouble),
                                 torch::randn({7}, torch::kBFloat16),
                                 torch::randn({2, 2}, torch::kHalf),
                                 torch::randn({}),
                                 torch::randn({3, 2}).t()};
  for (Tensor& parameter : parameters) {
    parameter.requires_grad_();
  }
  return parameters;
}

void change(const std::vector<Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  for (const Tensor& parameter : parameters) {
    parameter.add_(torch::randn_like(parameter));
  }
}

std::vector<Tensor> rounded_averages(const Ema& ema, const std::vector<Tensor>& parameters) {
  std::vector<Tensor> rounded;
  for (size_t i = 0; i < parameters.size(); ++i) {
    rounded.push_back(ema.averages()[i].to(parameters[i].scalar_type()));
  }
  return clones_of(rounded);
}

TEST(Ema, CopiesAtTheFirstUpdateAndAveragesAfterwards) {
  const Tensor p = torch::full({2}, 100.0f);
  Ema ema({p}, {.decay = 0.75});
  p.fill_(8.0f);
  ema.update();
  EXPECT_TRUE(torch::equal(ema.averages()[0], torch::full({2}, 8.0f)));
  p.fill_(16.0f);
  ema.update();
  EXPECT_TRUE(torch::equal(ema.averages()[0], torch::full({2}, 10.0f)));
  p.fill_(2.0f);
  ema.update();
  EXPECT_TRUE(torch::equal(ema.averages()[0], torch::full({2}, 8.0f)));
  EXPECT_EQ(ema.updates(), 3);
}

TEST(Ema, OfSixteenBitWeightsIsTheAverageOfTheirWidenedValues) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(3);
    const Tensor low = torch::randn({100}, type);
    const Tensor wide = low.to(torch::kFloat);
    Ema of_low({low}), of_wide({wide});
    for (int step = 0; step < 20; ++step) {
      low.add_(0.01);
      wide.copy_(low);
      of_low.update();
      of_wide.update();
    }
    EXPECT_EQ(of_low.averages()[0].scalar_type(), torch::kFloat);
    EXPECT_TRUE(same_bits(of_low.averages()[0], of_wide.averages()[0]));
    EXPECT_FALSE(same_bits(of_low.averages()[0].to(type), of_low.averages()[0])) << "it is finer than the weights";
  }
}

TEST(Ema, WithWarmUpBeginsWithSmallDecays) {
  const Tensor p = torch::zeros({1}, torch::kDouble);
  Ema ema({p}, {.decay = 0.25, .warm_up = true});
  double expected = 0;
  for (int n = 0; n < 6; ++n) {
    p.fill_(n + 1.0);
    ema.update();
    const double decay = n == 0 ? 0 : std::min(0.25, (1.0 + n) / (10.0 + n));  // 2/11, 3/12, then 0.25
    expected = decay * expected + (1 - decay) * (n + 1);
    EXPECT_NEAR(ema.averages()[0].item<double>(), expected, 1e-14) << n;
  }
}

TEST(Ema, WidensManyWeightsOneByOneAndGetsTheSame) {
  std::vector<Tensor> low;
  for (int i = 0; i < 5; ++i) {
    low.push_back(torch::full({4, 600, 1000}, i, torch::kBFloat16));  // 9.6 MB each in FP32
  }
  Ema ema(low, {.decay = 0.5});
  ema.update();
  for (const Tensor& tensor : low) {
    tensor.add_(2);
  }
  MemoryMeter meter;
  ema.update();
  EXPECT_LT(meter.report().peak_bytes, 3 * 9600000) << "not 48 MB";
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(
        torch::equal(ema.averages()[static_cast<size_t>(i)], torch::full({4, 600, 1000}, i + 1, torch::kFloat)));
  }
}

TEST(Ema, WhicheverAllocationFailsNothingHasChangedAndTheUpdateCanBeMadeAgain) {
  std::vector<Tensor> p = random_parameters();
  for (int i = 0; i < 3; ++i) {
    p.push_back(torch::full({3 << 20}, i, torch::kBFloat16));
  }
  for (const int64_t updates_before : {0, 1}) {
    for_each_failing_allocation([&](FailingAllocation& allocation) {
      Ema ema(p, {.decay = 0.5}), reference(p, {.decay = 0.5});
      for (int64_t n = 0; n < updates_before; ++n) {
        ema.update();
        reference.update();
      }
      change(p);
      const auto before = clones_of(ema.averages());
      if (allocation.stops([&] { ema.update(); })) {
        ASSERT_TRUE(same_bits(ema.averages(), before));
        ASSERT_EQ(ema.updates(), updates_before);
        ema.update();
      }
      reference.update();
      ASSERT_TRUE(same_bits(ema.averages(), reference.averages()));
    });
  }
}

TEST(EmaScope, GivesTheModelTheAveragesAndThenItsOwnWeightsBackToTheBit) {
  const auto p = random_parameters();
  Ema ema(p, {.decay = 0.5});
  ema.update();
  change(p);
  {
    const torch::NoGradGuard no_grad;
    p[0][0][0] = std::nanf("");
    p[0][0][1] = -0.0f;
  }
  ema.update();
  change({p[1], p[2], p[3], p[4], p[5]});
  const auto trained = clones_of(p);
  const auto averages = clones_of(ema.averages());
  const auto rounded = rounded_averages(ema, p);
  EXPECT_FALSE(same_bits(rounded, trained));
  {
    const Ema::Scope averaged(ema);
    EXPECT_TRUE(same_bits(clones_of(p), rounded));
    EXPECT_TRUE(p[0].requires_grad() && p[0].is_leaf());
  }
  EXPECT_TRUE(same_bits(clones_of(p), trained));
  EXPECT_TRUE(same_bits(ema.averages(), averages));
}

TEST(EmaScope, GivesTheWeightsBackWhenAnExceptionPasses) {
  const auto p = random_parameters();
  Ema ema(p);
  change(p);
  const auto trained = clones_of(p);
  try {
    const Ema::Scope averaged(ema);
    throw std::runtime_error("evaluation failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(same_bits(clones_of(p), trained));
  ema.update();
  EXPECT_EQ(ema.updates(), 1);
}

TEST(EmaScope, BreaksTheBackwardOfAForwardBeforeIt) {
  const Tensor p = torch::ones({2}, torch::requires_grad());
  Ema ema({p});
  const Tensor loss = (p * p).sum();
  {
    const Ema::Scope averaged(ema);
  }
  EXPECT_THROW(loss.backward(), c10::Error) << "autograd must see that the weights were written";
}

TEST(EmaScope, RefusesWhatWouldMixAveragesAndWeights) {
  const auto p = random_parameters();
  Ema ema(p);
  const StateDict state = ema.state_dict();
  const Ema::Scope averaged(ema);
  const auto now = clones_of(p);
  EXPECT_THAT(error_of<ConfigError>([&] { ema.update(); }), HasSubstr("Ema.update: the model holds the averages"));
  EXPECT_THROW(ema.state_dict(), ConfigError);
  EXPECT_THROW(ema.load_state_dict(state), ConfigError);
  EXPECT_THROW(Ema::Scope again(ema), ConfigError);
  EXPECT_TRUE(same_bits(clones_of(p), now));
}

TEST(Ema, CountsAParameterThatIsGivenTwiceOnce) {
  const Tensor p = torch::ones({2});
  Ema ema({p, p}, {.decay = 0.5});
  ema.update();
  p.fill_(3);
  ema.update();
  EXPECT_EQ(ema.averages().size(), 1U);
  {
    const Ema::Scope averaged(ema);
    EXPECT_TRUE(torch::equal(p, torch::full({2}, 2.0f)));
  }
  EXPECT_TRUE(torch::equal(p, torch::full({2}, 3.0f)));
}

TEST(Ema, GoesOnFromItsStateToTheBit) {
  const auto p = random_parameters();
  Ema saved(p, {.warm_up = true}), loaded(p, {.warm_up = true});
  for (int step = 0; step < 3; ++step) {
    change(p);
    saved.update();
  }
  stateful(loaded).load(stateful(saved).state());
  EXPECT_EQ(loaded.updates(), 3);
  change(p);
  saved.update();
  loaded.update();
  EXPECT_TRUE(same_bits(loaded.averages(), saved.averages()));
}

TEST(Ema, RefusesStatesOfOtherModelsAndIsUnchanged) {
  const Tensor p = torch::ones({2, 3});
  Ema ema({p});
  const auto refusal = [&](const std::vector<Tensor>& others) {
    return error_of<CorruptFile>([&] { ema.load_state_dict(Ema(others).state_dict()); });
  };
  EXPECT_THAT(refusal({torch::zeros({2, 3}), torch::zeros({1})}), HasSubstr("2 averages"));
  EXPECT_THAT(refusal({torch::zeros({3, 2})}), HasSubstr("average 0 is Float of 6"));
  EXPECT_THAT(refusal({torch::zeros({2, 3}, torch::kDouble)}), HasSubstr("average 0 is Double"));
  EXPECT_THROW(ema.load_state_dict({}), CorruptFile);
  EXPECT_TRUE(torch::equal(ema.averages()[0], p));
}

TEST(Ema, RefusesDecaysAndParametersThatAreNone) {
  const Tensor p = torch::ones({2});
  for (const double decay : {-0.1, 1.1, std::nan("")}) {
    EXPECT_THAT(error_of<ConfigError>([&] { Ema({p}, {.decay = decay}); }), HasSubstr("decay is"));
  }
  EXPECT_THAT(error_of<ConfigError>([&] { Ema({}); }), HasSubstr("no parameters"));
  EXPECT_THAT(error_of<ConfigError>([&] { Ema({p, torch::ones({2}, torch::kLong)}); }),
              HasSubstr("parameter 1 is Long"));
  EXPECT_THAT(error_of<ConfigError>([&] { Ema({Tensor()}); }), HasSubstr("parameter 0 is undefined"));
}

/// Weights, averages and learning rate after six updates, with steps between them that overflow. Those are gated as the
/// headers of Ema and WarmupCosine show, or not at all.
std::vector<Tensor> six_updates(bool with_overflows, bool gated = true) {
  const auto p = testing::random_parameters();
  AdamW optimizer(p);
  GradScaler scaler({.init_scale = 1024});
  scaler.scale(torch::ones({}));
  Ema ema(p, {.decay = 0.9, .warm_up = true});
  const WarmupCosine schedule{.peak = 0.1, .warmup_steps = 3, .total_steps = 8};
  int64_t updates = 0;
  const auto step = [&](bool finite, uint64_t seed) {
    testing::set_gradients(p, seed, 1024);
    if (!finite) {
      p[1].mutable_grad()[5] = INFINITY;
    }
    optimizer.param_groups()[0].options().set_lr(schedule.at(updates));
    const GradScaler::Outcome outcome = scaler.step(optimizer);
    EXPECT_EQ(outcome, finite);
    if (outcome || !gated) {
      ema.update();
      ++updates;
    }
    scaler.update(1024.0);
  };
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    if (with_overflows && seed % 2 == 1) {  // the first step, too: there is no average yet
      step(false, 100 + seed);
    }
    step(true, seed);
  }
  auto all = clones_of(p);
  const auto averages = clones_of(ema.averages());
  all.insert(all.end(), averages.begin(), averages.end());
  all.push_back(torch::tensor({schedule.at(updates), static_cast<double>(ema.updates())}, torch::kDouble));
  return all;
}

TEST(Ema, AndTheScheduleKnowNothingOfStepsThatAScalerSkipped) {
  EXPECT_TRUE(same_bits(six_updates(true), six_updates(false)));
  EXPECT_FALSE(same_bits(six_updates(true, /*gated=*/false), six_updates(false))) << "the overflows would be seen";
}

TEST(Ema, IsNoPartOfAutograd) {
  const auto p = random_parameters();
  Ema ema(p);
  ema.update();
  ema.update();
  for (const Tensor& average : ema.averages()) {
    EXPECT_FALSE(average.requires_grad());
  }
}

}  // namespace
}  // namespace snug::ema_test
