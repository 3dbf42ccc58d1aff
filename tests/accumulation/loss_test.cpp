#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "snug/accumulation.h"
#include "snug/core.h"

namespace snug::loss_test {
namespace {

TEST(Loss, KeepsValueKindAndCount) {
  const Loss loss = Loss::mean(torch::tensor(0.5), 4);
  EXPECT_EQ(loss.kind(), Loss::Kind::Mean);
  EXPECT_EQ(loss.count(), 4);
  EXPECT_EQ(loss.value().item<float>(), 0.5F);
  EXPECT_EQ(Loss::sum(torch::tensor(0.5), torch::tensor(7)).count(), 7);
  EXPECT_EQ(Loss::whole(torch::tensor(0.5)).kind(), Loss::Kind::Whole);
}

TEST(Loss, RefusesWhatIsNoScalarOrNoCount) {
  EXPECT_THROW((void)Loss::sum(torch::ones({2}), 2), ConfigError);
  EXPECT_THROW((void)Loss::sum(torch::Tensor(), 2), ConfigError);
  EXPECT_THROW((void)Loss::sum(torch::ones({}), -1), ConfigError);
  EXPECT_THROW((void)Loss::sum(torch::ones({}), torch::ones({2}, torch::kLong)), ConfigError);
}

// Cut to a whole number it would give gradients of another scale.
TEST(Loss, RefusesACountThatIsNoNumberOfItemsWhenItIsRead) {
  for (const double count : {2.5, 0.4, -1.0, std::numeric_limits<double>::quiet_NaN(), HUGE_VAL}) {
    EXPECT_THROW((void)Loss::sum(torch::ones({}), torch::tensor(count)).count(), ConfigError) << count;
  }
  EXPECT_EQ(Loss::sum(torch::ones({}), torch::tensor(3.0f)).count(), 3);
  EXPECT_EQ(Loss::sum(torch::ones({}), torch::tensor(true)).count(), 1);
}

}  // namespace
}  // namespace snug::loss_test
