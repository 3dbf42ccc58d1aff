#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/accumulation.h"
#include "snug/core.h"
#include "tests/support/lazy_gradient.h"
#include "tests/support/tensors.h"

namespace snug::window_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

Tensor on_device(int64_t count) { return torch::tensor(count); }

/// One weight w; item i has loss w * i, so the gradient of the mean over items is the mean of the items.
struct Weight {
  Tensor w = torch::ones({}, torch::requires_grad());
  AccumulationWindow window{{{"w", w}}};

  Tensor losses(double begin, double end) const { return w * torch::arange(begin, end, torch::kFloat); }
  Loss sum_over(double begin, double end) const {
    const Tensor each = losses(begin, end);
    return Loss::sum(each.sum(), each.numel());
  }
  void add(const Loss& loss, double parts = 2) {
    if (const Tensor weighted = window.weigh(loss, parts); weighted.defined()) {
      weighted.backward();
    }
  }
  float gradient() const { return w.grad().item<float>(); }
};

TEST(Window, GivesTheGradientOfTheMeanOverAllItemsForAnySplit) {
  Weight t;
  t.window.weigh(t.sum_over(0, 7), 12.0 / 7).backward();
  t.window.weigh(t.sum_over(7, 8), 12.0).backward();
  t.window.weigh(t.sum_over(8, 12), 3.0).backward();
  const auto totals = t.window.close();
  EXPECT_EQ(totals.items, 12);
  EXPECT_EQ(totals.micro_batches, 3);
  EXPECT_DOUBLE_EQ(totals.mean_loss.item<double>(), 5.5);
  EXPECT_FLOAT_EQ(t.gradient(), 5.5f);
}

TEST(Window, CorrectsWhatWasExpectedWrongly) {
  Weight t;
  t.window.weigh(t.sum_over(0, 4), /*expected_parts=*/10).backward();  // ten times four were expected
  t.window.weigh(t.sum_over(4, 6), 10).backward();
  const auto totals = t.window.close();
  EXPECT_DOUBLE_EQ(totals.correction, 40.0 / 6.0);
  EXPECT_FLOAT_EQ(t.gradient(), 2.5f);
}

// With the divisor of the final count nothing is corrected: the very bits of a plain (s / n).backward().
TEST(Window, OneMicroBatchGivesTheBitsOfPlainTraining) {
  torch::manual_seed(1);
  const Tensor x = torch::randn({7, 5});
  auto layer = torch::nn::Linear(5, 3);
  (layer->forward(x).exp().sum() / 21).backward();
  const auto expected = testing::gradients_of(*layer);
  const auto parameters = [&] {
    return std::vector<std::pair<std::string, Tensor>>{{"w", layer->weight}, {"b", layer->bias}};
  };
  for (const bool on_a_device : {false, true}) {
    layer->zero_grad();
    AccumulationWindow window(parameters());
    const Tensor sum = layer->forward(x).exp().sum();
    window.weigh(on_a_device ? Loss::sum(sum, on_device(21)) : Loss::sum(sum, 21), 1).backward();
    EXPECT_EQ(window.close().correction, 1.0);
    EXPECT_TRUE(testing::same_bits(testing::gradients_of(*layer), expected)) << on_a_device;
  }
}

TEST(Window, AGradientOfASharedParameterIsCorrectedOnce) {
  const Tensor w = torch::ones({}, torch::requires_grad());
  AccumulationWindow window({{"encoder.w", w}, {"decoder.w", w}});
  window.weigh(Loss::sum(w * 6, 3), /*expected_parts=*/2).backward();  // 6 items are expected, 3 come
  EXPECT_EQ(window.close().correction, 2.0);
  EXPECT_FLOAT_EQ(w.grad().item<float>(), 2.0f);
}

TEST(Window, HasNoItemsIfNoMicroBatchHas) {
  Weight t;
  EXPECT_FALSE(t.window.weigh(Loss::sum(t.w * 0, 0), 1).defined());
  const auto totals = t.window.close();
  EXPECT_EQ(totals.items, 0);
  EXPECT_FALSE(totals.mean_loss.defined());
}

TEST(Window, NamesAParameterThatWasWrittenInside) {
  Weight t;
  t.window.weigh(t.sum_over(0, 2), 2).backward();
  {
    const torch::NoGradGuard no_grad;
    t.w.add_(1);
  }
  EXPECT_THAT(error_of<ConfigError>([&] { t.window.check_parameters(); }), HasSubstr("'w'"));
  EXPECT_THROW(t.window.weigh(t.sum_over(0, 2), 2), ConfigError);
  EXPECT_THROW(t.window.close(), ConfigError);
}

TEST(Window, RefusesToMixKindsAndToSplitAWhole) {
  Weight t;
  t.window.weigh(t.sum_over(0, 2), 2).backward();
  EXPECT_THROW(t.window.weigh(Loss::mean(t.w * 1, 1), 2), ConfigError);
  AccumulationWindow other({{"w", t.w}});
  other.weigh(Loss::whole(t.w * 1), 1);
  EXPECT_THROW(other.weigh(Loss::whole(t.w * 1), 1), ConfigError);
}

TEST(Window, DropsGradientsWhenAbandoned) {
  Weight t;
  t.window.weigh(t.sum_over(0, 2), 2).backward();
  t.window.abandon();
  EXPECT_FALSE(t.w.grad().defined());
  EXPECT_EQ(t.window.size(), 0);
}

TEST(Window, MayBeUsedAgainAndRemembersNothing) {
  Weight t;
  for (int round = 0; round < 3; ++round) {
    t.w.mutable_grad().reset();
    t.add(t.sum_over(0, 4), 1 + round);
    EXPECT_EQ(t.window.close().items, 4);
    EXPECT_FLOAT_EQ(t.gradient(), 1.5f) << round;
    t.add(Loss::sum(t.losses(0, 100).sum(), on_device(100)), 1);
    t.window.abandon();
  }
}

// --- counts

TEST(WindowCounts, MayComeFromTheHostAndFromADeviceInOneWindow) {
  for (const bool device_first : {false, true}) {
    Weight t;
    if (device_first) {
      t.add(Loss::sum(t.losses(0, 3).sum(), on_device(3)));
      t.add(t.sum_over(3, 8));
    } else {
      t.add(t.sum_over(0, 3));
      t.add(Loss::sum(t.losses(3, 8).sum(), on_device(5)));
    }
    const auto totals = t.window.close();
    EXPECT_EQ(totals.items, 8);
    EXPECT_DOUBLE_EQ(totals.mean_loss.item<double>(), 3.5);
    EXPECT_FLOAT_EQ(t.gradient(), 3.5f) << device_first;
  }
}

// (w * items * 0).sum() / 0 is NaN, and 0 times its gradient is NaN too: only leaving it out helps.
TEST(WindowCounts, AMeanOverNothingIsLeftOut) {
  Weight t;
  const Tensor mask = torch::zeros({4});
  const Tensor nothing = (t.losses(0, 4) * mask).sum() / mask.sum();
  ASSERT_TRUE(std::isnan(nothing.item<float>()));
  EXPECT_FALSE(t.window.weigh(Loss::mean(nothing, 0), 2).defined());
  t.add(Loss::mean(t.losses(4, 8).mean(), 4));
  t.add(Loss::mean(nothing, 0));
  const auto totals = t.window.close();
  EXPECT_EQ(totals.items, 4);
  EXPECT_EQ(totals.micro_batches, 3);
  EXPECT_DOUBLE_EQ(totals.mean_loss.item<double>(), 5.5);
  EXPECT_FLOAT_EQ(t.gradient(), 5.5f);
}

TEST(WindowCounts, ThatDoNotAddUpToAWholeNumberAreRefused) {
  Weight t;
  t.add(Loss::sum(t.losses(0, 3).sum(), torch::tensor(1.25)));
  t.add(Loss::sum(t.losses(0, 3).sum(), torch::tensor(1.25)));
  EXPECT_THAT(error_of<ConfigError>([&] { t.window.close(); }), HasSubstr("count is 2.5"));
  t.window.abandon();
  t.add(Loss::sum(t.losses(0, 3).sum(), torch::tensor(1.25)));
  t.add(Loss::sum(t.losses(3, 4).sum(), torch::tensor(2.75)));
  EXPECT_EQ(t.window.close().items, 4);
  EXPECT_FLOAT_EQ(t.gradient(), 1.5f);
}

// The first micro-batch with items sets the divisor: one without must not, or FP16 gradients would not be divided at
// all.
TEST(WindowCounts, AnEmptyFirstMicroBatchDoesNotSetTheDivisor) {
  for (const bool first_on_device : {false, true}) {
    for (const bool second_on_device : {false, true}) {
      Weight t;
      const auto sum = [](const Tensor& value, int64_t count, bool is_on_device) {
        return is_on_device ? Loss::sum(value, on_device(count)) : Loss::sum(value, count);
      };
      t.add(sum(t.w * 0, 0, first_on_device), 2);
      t.add(sum(t.losses(0, 5).sum(), 5, second_on_device), 2);
      EXPECT_FLOAT_EQ(t.gradient(), 10.0f / 10.0f) << "divided by the 2 x 5 items that are expected";
      t.window.close();
      EXPECT_FLOAT_EQ(t.gradient(), 2.0f);
    }
  }
}

TEST(WindowCounts, SumsAndMeansOfAnyRandomSplitGiveTheSameGradient) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    Weight sums, means, tensors;
    int64_t begin = 0;
    const auto parts = 1 + static_cast<int64_t>(random() % 6);
    for (int64_t part = 0; part < parts; ++part) {
      const auto count = static_cast<int64_t>(random() % 5);
      const auto b = static_cast<double>(begin), e = static_cast<double>(begin + count);
      const auto expected_parts = static_cast<double>(parts);
      sums.add(Loss::sum(sums.losses(b, e).sum(), count), expected_parts);
      means.add(Loss::mean(means.losses(b, e).mean(), count), expected_parts);
      tensors.add(Loss::sum(tensors.losses(b, e).sum(), on_device(count)), expected_parts);
      begin += count;
    }
    // Below 30 items of at most 29, a handful of roundings: 1e-6 relative.
    const double mean = (static_cast<double>(begin) - 1) / 2;
    for (Weight* weight : {&sums, &means, &tensors}) {
      const auto totals = weight->window.close();
      ASSERT_EQ(totals.items, begin);
      if (begin > 0) {
        EXPECT_NEAR(totals.mean_loss.item<double>(), mean, weight == &means ? 1e-6 * mean : 0);
        EXPECT_NEAR(weight->gradient(), mean, 1e-6 * mean);
      }
    }
  }
}

TEST(WindowCounts, AnFp16LossOverMoreItemsThanFp16CanCountKeepsItsGradient) {
  constexpr int64_t kItems = 100'000;  // FP16 ends at 65,504
  for (const bool on_a_device : {false, true}) {
    Weight t;
    const Tensor sum = (t.w * 50'000).to(torch::kHalf);
    t.add(on_a_device ? Loss::sum(sum, on_device(kItems)) : Loss::sum(sum, kItems), 1);
    EXPECT_EQ(t.window.close().items, kItems);
    EXPECT_NEAR(t.gradient(), 0.5, 0.5 * std::ldexp(1.0, -8)) << on_a_device;  // two roundings to FP16 subnormals
  }
}

TEST(Window, GivesTheMeanLossAloneToAProcessWithoutItemsWhereOthersHaveMetrics) {
  Weight t;
  t.window.begin();
  const auto totals = t.window.close([](double& items, Tensor& sums) {
    items = 4;
    sums = torch::tensor({6.0, 10.0}, torch::kDouble);
  });
  EXPECT_EQ(totals.items, 4);
  EXPECT_EQ(totals.mean_loss.dim(), 0);
  EXPECT_DOUBLE_EQ(totals.mean_loss.item<double>(), 1.5);
  EXPECT_TRUE(totals.metrics.empty());
}

TEST(Window, CorrectsAGradientWhoseMemoryHasTheNegative) {
  const Tensor w = testing::one();
  AccumulationWindow window{{{"w", w}}};
  window.begin();
  const auto loss = [&](int64_t items) {
    const Tensor z = torch::complex(torch::ones_like(w), w);
    return Loss::sum(torch::real(torch::conj(z) * torch::complex(torch::zeros({1}), torch::full({1}, 0.7))).sum(),
                     items);
  };
  window.weigh(loss(1), /*expected_parts=*/2).backward();  // two items were expected
  ASSERT_TRUE(w.grad().is_neg());
  window.close();
  EXPECT_FLOAT_EQ(w.grad().item<float>(), 0.7f);
}

}  // namespace
}  // namespace snug::window_test
