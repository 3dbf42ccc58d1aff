#include "snug/accumulation/window.h"

#include <limits>

#include <gtest/gtest.h>

#include "snug/core/error.h"

namespace snug::window_test {
namespace {

// One weight w; item i has loss w * i, so the gradient of the mean over items is the mean of the items.
class Window : public ::testing::Test {
 protected:
  Loss sum_over(double begin, double end) {
    const auto items = torch::arange(begin, end, torch::kFloat);
    return Loss::sum((weight * items).sum(), items.numel());
  }
  double gradient() const { return weight.grad().item<double>(); }

  torch::Tensor weight = torch::ones({}, torch::requires_grad());
  AccumulationWindow window{{{"weight", weight}}};
};

TEST_F(Window, GivesTheGradientOfTheMeanOverAllItemsForAnySplit) {
  window.weigh(sum_over(0, 7), 12.0 / 7).backward();
  window.weigh(sum_over(7, 8), 12.0).backward();
  window.weigh(sum_over(8, 12), 3.0).backward();
  const auto totals = window.close();
  EXPECT_EQ(totals.items, 12);
  EXPECT_EQ(totals.micro_batches, 3);
  EXPECT_DOUBLE_EQ(totals.mean_loss.item<double>(), 5.5);
  EXPECT_FLOAT_EQ(static_cast<float>(gradient()), 5.5F);
}

TEST_F(Window, CorrectsWhatWasExpectedWrongly) {
  window.weigh(sum_over(0, 4), /*expected_parts=*/10).backward();  // ten times four were expected
  window.weigh(sum_over(4, 6), 10).backward();
  const auto totals = window.close();
  EXPECT_DOUBLE_EQ(totals.correction, 40.0 / 6.0);
  EXPECT_FLOAT_EQ(static_cast<float>(gradient()), 2.5F);
}

TEST_F(Window, MeansAndSumsAgree) {
  const auto items = torch::arange(0, 6, torch::kFloat);
  window.weigh(Loss::mean((weight * items.slice(0, 0, 4)).mean(), 4), 1.5).backward();
  window.weigh(Loss::mean((weight * items.slice(0, 4, 6)).mean(), 2), 1.5).backward();
  const auto totals = window.close();
  EXPECT_FLOAT_EQ(totals.mean_loss.item<float>(), 2.5F);
  EXPECT_FLOAT_EQ(static_cast<float>(gradient()), 2.5F);
}

TEST_F(Window, TakesCountsThatLieOnADevice) {
  window.weigh(Loss::sum((weight * 6).sum(), torch::tensor(3)), 2).backward();
  window.weigh(Loss::sum((weight * 2).sum(), torch::tensor(1)), 2).backward();
  window.weigh(Loss::sum((weight * 0).sum(), torch::tensor(0)), 2).backward();
  EXPECT_EQ(window.close().items, 4);
  EXPECT_FLOAT_EQ(static_cast<float>(gradient()), 2.0F);
}

TEST_F(Window, LeavesOutAMicroBatchWithoutItemsEvenIfItsMeanIsNaN) {
  const auto nan = torch::tensor(std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(window.weigh(Loss::mean(weight * nan, 0), 2).defined());
  window.weigh(Loss::mean((weight * torch::tensor({3.0F, 4.0F})).mean(), 2), 1).backward();
  EXPECT_EQ(window.close().items, 2);
  EXPECT_FLOAT_EQ(static_cast<float>(gradient()), 3.5F);
}

TEST_F(Window, HasNoItemsIfNoMicroBatchHas) {
  EXPECT_FALSE(window.weigh(Loss::sum(weight * 0, 0), 1).defined());
  const auto totals = window.close();
  EXPECT_EQ(totals.items, 0);
  EXPECT_FALSE(totals.mean_loss.defined());
}

TEST_F(Window, NamesAParameterThatWasWrittenInside) {
  window.weigh(sum_over(0, 2), 2).backward();
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
  try {
    window.check_parameters();
    FAIL() << "the write was not noticed";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("'weight'"), std::string::npos) << error.what();
  }
  EXPECT_THROW(window.weigh(sum_over(0, 2), 2), ConfigError);
  EXPECT_THROW(window.close(), ConfigError);
}

TEST_F(Window, RefusesToMixKindsAndToSplitAWhole) {
  window.weigh(sum_over(0, 2), 2).backward();
  EXPECT_THROW(window.weigh(Loss::mean(weight * 1, 1), 2), ConfigError);
  AccumulationWindow other({{"weight", weight}});
  other.weigh(Loss::whole(weight * 1), 1);
  EXPECT_THROW(other.weigh(Loss::whole(weight * 1), 1), ConfigError);
}

TEST_F(Window, DropsGradientsWhenAbandoned) {
  window.weigh(sum_over(0, 2), 2).backward();
  window.abandon();
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_EQ(window.size(), 0);
}

}  // namespace
}  // namespace snug::window_test
