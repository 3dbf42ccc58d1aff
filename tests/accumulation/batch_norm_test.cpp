#include "snug/accumulation/batch_norm.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "tests/support/tensors.h"

namespace snug {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNormOptions;

BatchNorm1d with_momentum(std::optional<double> momentum, int64_t features = 3) {
  return BatchNorm1d(BatchNormOptions(features).momentum(momentum));
}

TEST(AdjustBatchNormMomentum, MakesEqualMicroBatchesMoveTheStatisticsAsOneBatchDoes) {
  torch::manual_seed(2);
  const auto x = torch::randn({16, 3}, torch::kDouble) * 3 + 1;
  for (const int64_t micro_batches : {2, 7, 32}) {
    BatchNorm1d whole = with_momentum(0.1), split = with_momentum(0.1);
    whole->to(torch::kDouble);
    split->to(torch::kDouble);
    EXPECT_EQ(adjust_batch_norm_momentum(*split, micro_batches), *split->options.momentum());
    whole->forward(x);
    for (int64_t k = 0; k < micro_batches; ++k) {
      split->forward(x);
    }
    EXPECT_TRUE(torch::allclose(split->running_mean, whole->running_mean, 1e-12, 0)) << micro_batches;
    EXPECT_TRUE(torch::allclose(split->running_var, whole->running_var, 1e-12, 0)) << micro_batches;
  }
}

TEST(AdjustBatchNormMomentum, ReachesEveryBatchNormOfTheTreeOnceAndNothingElse) {
  BatchNorm1d shared = with_momentum(0.5);
  torch::nn::BatchNorm2d two(BatchNormOptions(3).momentum(0.2));
  torch::nn::BatchNorm3d three(BatchNormOptions(3).momentum(1.0));
  torch::nn::InstanceNorm1d instance(torch::nn::InstanceNorm1dOptions(3).momentum(0.5));
  torch::nn::Sequential inner(two, instance);
  torch::nn::ModuleList model(torch::nn::Linear(3, 3), shared, inner, three, shared);
  EXPECT_DOUBLE_EQ(adjust_batch_norm_momentum(*model, 2), 1 - std::sqrt(0.5)) << "the first's";
  EXPECT_DOUBLE_EQ(*shared->options.momentum(), 1 - std::sqrt(0.5));
  EXPECT_DOUBLE_EQ(*two->options.momentum(), 1 - std::sqrt(0.8));
  EXPECT_EQ(*three->options.momentum(), 1.0);
  EXPECT_EQ(instance->options.momentum(), 0.5);
}

TEST(AdjustBatchNormMomentum, KeepsTheDigitsOfASmallMomentum) {
  BatchNorm1d norm = with_momentum(1e-17);
  EXPECT_DOUBLE_EQ(adjust_batch_norm_momentum(*norm, 4), 0.25e-17);
}

TEST(AdjustBatchNormMomentum, ChangesNothingForOneMicroBatch) {
  BatchNorm1d norm = with_momentum(0.1);
  EXPECT_EQ(adjust_batch_norm_momentum(*norm, 1), 0.1);
  EXPECT_EQ(*norm->options.momentum(), 0.1);
}

TEST(AdjustBatchNormMomentum, PassesOverCumulativeAveragesAndModulesWithoutStatistics) {
  BatchNorm1d cumulative = with_momentum(std::nullopt);
  BatchNorm1d without(BatchNormOptions(3).track_running_stats(false));
  torch::nn::Sequential model(cumulative, without);
  EXPECT_THAT(error_of<ConfigError>([&] { adjust_batch_norm_momentum(*model, 2); }), HasSubstr("has no BatchNorm"));
  model->push_back(with_momentum(0.75));
  EXPECT_DOUBLE_EQ(adjust_batch_norm_momentum(*model, 2), 0.5);
  EXPECT_FALSE(cumulative->options.momentum());
  EXPECT_EQ(*without->options.momentum(), 0.1);
}

TEST(AdjustBatchNormMomentum, RefusesWhatCannotBeAdjustedAndChangesNothing) {
  torch::nn::Sequential model(with_momentum(0.1), with_momentum(1.5));
  EXPECT_THAT(error_of<ConfigError>([&] { adjust_batch_norm_momentum(*model, 2); }), HasSubstr("a momentum is 1.5"));
  EXPECT_EQ(*model->ptr(0)->as<BatchNorm1d>()->options.momentum(), 0.1);
  EXPECT_THAT(error_of<ConfigError>([&] { adjust_batch_norm_momentum(*model, 0); }), HasSubstr("micro_batches is 0"));
  EXPECT_THROW(adjust_batch_norm_momentum(*torch::nn::Linear(2, 2), 2), ConfigError);
}

}  // namespace
}  // namespace snug
