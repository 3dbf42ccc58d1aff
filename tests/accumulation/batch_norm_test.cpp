#include "snug/extra/batch_norm.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "tests/support/tensors.h"

namespace snug::batch_norm_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;
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

// A BatchNorm held by a typed member, as most models have it.
struct TypedImpl : torch::nn::Module {
  torch::nn::BatchNorm2d bn{nullptr};
  TypedImpl() { bn = register_module("bn", torch::nn::BatchNorm2d(6)); }
  Tensor forward(const Tensor& x) { return bn->forward(x); }
};
TORCH_MODULE(Typed);

torch::nn::BatchNorm2d trained_norm(int64_t channels) {
  torch::nn::BatchNorm2d norm(BatchNormOptions(channels).eps(0.25));
  const torch::NoGradGuard no_grad;
  norm->weight.normal_();
  norm->bias.normal_();
  norm->weight.set_requires_grad(false);
  return norm;
}

TEST(BatchNormToGroupNorm, ComputesWithGroupNormInASequentialAndKeepsTheAffineParameters) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Conv2d(1, 6, 3), trained_norm(6), torch::nn::ReLU());
  model->to(torch::kDouble);
  model->eval();
  const auto x = torch::randn({2, 1, 5, 5}, torch::kDouble);
  const auto weight = model->ptr(1)->as<torch::nn::BatchNorm2d>()->weight.clone();
  const auto bias = model->ptr(1)->as<torch::nn::BatchNorm2d>()->bias.clone();
  const auto expected =
      torch::relu(torch::group_norm(model->ptr(0)->as<torch::nn::Conv2d>()->forward(x), 3, weight, bias, 0.25));
  const auto changes = batch_norm_to_group_norm(*model, 5);
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_EQ(changes[0].name, "1");
  EXPECT_EQ(changes[0].channels, 6);
  EXPECT_EQ(changes[0].groups, 3) << "4 and 5 do not divide 6";
  EXPECT_TRUE(torch::equal(model->forward(x), expected));
  const auto group = std::dynamic_pointer_cast<torch::nn::GroupNormImpl>(model->named_children()["1"]);
  ASSERT_TRUE(group) << "registered, too";
  EXPECT_FALSE(group->weight.requires_grad());
  EXPECT_TRUE(group->bias.requires_grad());
  EXPECT_FALSE(group->is_training());
}

TEST(BatchNormToGroupNorm, ReachesListsDictionariesAndWhatIsOnlyRegistered) {
  torch::nn::ModuleList list(torch::nn::Linear(2, 2), trained_norm(4));
  torch::nn::ModuleDict dict(torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>(
      {{"norm", trained_norm(8).ptr()}, {"last", torch::nn::Linear(2, 2).ptr()}}));
  const auto model = std::make_shared<torch::nn::Module>();
  model->register_module("list", list);
  model->register_module("dict", dict);
  model->register_module("plain", BatchNorm1d(BatchNormOptions(7).affine(false)));
  std::vector<std::string> names;
  for (const auto& change : batch_norm_to_group_norm(*model)) {
    names.push_back(change.name);
    EXPECT_EQ(change.groups, change.channels) << "up to 32";
  }
  EXPECT_THAT(names, ::testing::ElementsAre("list.1", "dict.norm", "plain"));
  EXPECT_TRUE(list->ptr(1)->as<torch::nn::GroupNorm>());
  EXPECT_TRUE(dict["norm"]->as<torch::nn::GroupNorm>());
  EXPECT_THAT(dict->keys(), ::testing::ElementsAre("norm", "last"));
  EXPECT_FALSE(model->named_children()["plain"]->as<torch::nn::GroupNorm>()->weight.defined());
  EXPECT_THAT(model->named_parameters().keys(), ::testing::Not(::testing::Contains(HasSubstr("running"))));
}

TEST(BatchNormToGroupNorm, KeepsALayerThatIsUsedTwiceOne) {
  torch::nn::Sequential model;
  {
    const auto shared = trained_norm(4);
    model->push_back(shared);
    model->push_back(shared);
  }
  EXPECT_EQ(batch_norm_to_group_norm(*model, 2).size(), 2U);
  EXPECT_TRUE(model->ptr(0)->as<torch::nn::GroupNorm>());
  EXPECT_EQ(model->ptr(0), model->ptr(1));
}

TEST(BatchNormToGroupNorm, NamesATypedMemberWithWhatToWriteAndChangesNothing) {
  torch::nn::Sequential model(trained_norm(4), Typed());
  const auto message = error_of<ConfigError>([&] { batch_norm_to_group_norm(*model, 4); });
  EXPECT_THAT(message, HasSubstr("'1.bn' is held by a member or variable"));
  EXPECT_THAT(message, HasSubstr("`torch::nn::GroupNorm bn{nullptr};`"));
  EXPECT_THAT(message, HasSubstr("register_module(\"bn\", torch::nn::GroupNorm(torch::nn::GroupNormOptions(3, 6)))"));
  EXPECT_TRUE(model->ptr(0)->as<torch::nn::BatchNorm2d>());
}

TEST(BatchNormToGroupNorm, RefusesWhatHasNothingToReplace) {
  EXPECT_THAT(error_of<ConfigError>([] { batch_norm_to_group_norm(*torch::nn::Sequential(torch::nn::ReLU())); }),
              HasSubstr("has no BatchNorm"));
  EXPECT_THAT(error_of<ConfigError>([] { batch_norm_to_group_norm(*with_momentum(0.1)); }), HasSubstr("itself"));
  EXPECT_THAT(error_of<ConfigError>([] { batch_norm_to_group_norm(*torch::nn::Sequential(with_momentum(0.1)), 0); }),
              HasSubstr("groups is 0"));
}

TEST(FrozenBatchNorm, LeavesTheStatisticsAndTrainsTheRest) {
  BatchNorm1d norm = with_momentum(0.1), asleep = with_momentum(0.1);
  torch::nn::Sequential model(torch::nn::Linear(3, 3), norm, torch::nn::Dropout(0.5), asleep);
  asleep->eval();
  {
    const FrozenBatchNorm frozen(*model);
    EXPECT_FALSE(norm->is_training());
    EXPECT_TRUE(model->ptr(2)->is_training()) << "dropout";
    model->forward(torch::randn({8, 3})).sum().backward();
  }
  EXPECT_TRUE(torch::equal(norm->running_mean, torch::zeros(3)));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
  EXPECT_TRUE(norm->weight.grad().defined());
  EXPECT_TRUE(norm->is_training());
  EXPECT_FALSE(asleep->is_training()) << "as it was";
  EXPECT_THAT(error_of<ConfigError>([] { FrozenBatchNorm frozen(*torch::nn::Linear(2, 2)); }),
              HasSubstr("FrozenBatchNorm: the module has no BatchNorm"));
}

TEST(PreciseBatchNorm, FindsMeanAndVarianceOfAllBatchesHoweverTheyAreDivided) {
  torch::manual_seed(4);
  const auto x = torch::randn({50, 3, 4}, torch::kDouble) * torch::tensor({1.0, 5.0, 0.1}).view({1, 3, 1}) + 100;
  BatchNorm1d norm = with_momentum(0.1);
  norm->to(torch::kDouble);
  const auto count = precise_batch_norm(*norm, [&] {
    int64_t begin = 0;
    for (const int64_t size : {1, 9, 33, 7}) {
      norm->forward(x.narrow(0, begin, size));
      begin += size;
    }
  });
  EXPECT_EQ(count, 200);
  const auto [variance, mean] = torch::var_mean(x, at::IntArrayRef{0, 2}, /*correction=*/1);
  EXPECT_TRUE(torch::allclose(norm->running_mean, mean, 1e-14, 0));
  EXPECT_TRUE(torch::allclose(norm->running_var, variance, 1e-12, 0));
}

TEST(PreciseBatchNorm, NormalisesByBatchAndSeesEveryLayerAndEveryUse) {
  torch::manual_seed(5);
  BatchNorm1d first = with_momentum(std::nullopt), twice = with_momentum(0.3);
  torch::nn::Sequential model(first, torch::nn::ReLU(), twice, torch::nn::Dropout(0.5), twice);
  const auto a = torch::randn({6, 3}), b = torch::randn({4, 3}) * 9;
  const auto normalised = [](const Tensor& x) {
    return torch::batch_norm(x, {}, {}, {}, {}, /*training=*/true, 0, 1e-5, /*cudnn_enabled=*/true);
  };
  std::vector<Tensor> seen_by_twice;
  for (const auto& x : {a, b}) {
    seen_by_twice.push_back(normalised(x).relu());
    seen_by_twice.push_back(normalised(seen_by_twice.back()));
  }
  EXPECT_EQ(precise_batch_norm(*model, [&] { model->forward(a), model->forward(b); }), 10);
  const auto all = torch::cat(seen_by_twice).to(torch::kDouble);
  EXPECT_TRUE(torch::allclose(twice->running_mean, all.mean(0).to(torch::kFloat), 0, 1e-6));
  EXPECT_TRUE(torch::allclose(twice->running_var, all.var(0).to(torch::kFloat), 1e-5, 0));
}

TEST(PreciseBatchNorm, TouchesNothingElseAndPutsBackWhatItTouchedOnFailure) {
  BatchNorm1d norm = with_momentum(0.1), asleep = with_momentum(0.2);
  torch::nn::Sequential model(norm, torch::nn::Dropout(0.5), asleep);
  asleep->eval();
  model->forward(torch::randn({8, 3}));
  const auto mean = norm->running_mean.clone();
  const auto generator = at::globalContext().defaultGenerator(torch::kCPU).get_state().clone();
  const auto x = torch::ones({8, 3}) + torch::arange(24).view({8, 3});
  EXPECT_THROW(precise_batch_norm(*model,
                                  [&] {
                                    model->forward(x);
                                    throw std::runtime_error("the data ended");
                                  }),
               std::runtime_error);
  EXPECT_TRUE(torch::equal(norm->running_mean, mean));
  precise_batch_norm(*model, [&] {
    EXPECT_FALSE(model->forward(x).requires_grad());
    EXPECT_FALSE(model->ptr(1)->is_training()) << "dropout";
  });
  EXPECT_FALSE(torch::equal(norm->running_mean, mean));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  EXPECT_EQ(norm->options.momentum(), 0.1);
  EXPECT_TRUE(norm->is_training() && model->is_training() && model->ptr(1)->is_training());
  EXPECT_FALSE(asleep->is_training());
  EXPECT_TRUE(torch::equal(at::globalContext().defaultGenerator(torch::kCPU).get_state(), generator));
}

TEST(PreciseBatchNorm, NamesALayerThatSawNothing) {
  torch::nn::Sequential model(with_momentum(0.1), with_momentum(0.1));
  EXPECT_THAT(error_of<ConfigError>([&] {
                precise_batch_norm(*model, [&] { model->ptr(0)->as<BatchNorm1d>()->forward(torch::randn({4, 3})); });
              }),
              HasSubstr("0 values per channel passed 1;"));
}

}  // namespace
}  // namespace snug::batch_norm_test
