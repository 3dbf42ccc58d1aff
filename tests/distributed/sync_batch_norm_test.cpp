#include "snug/distributed/sync_batch_norm.h"

#include <algorithm>
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/models/resnet.h"
#include "snug/adamw.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/extra/batch_norm.h"
#include "src/distributed/launch_environment.h"
#include "tests/distributed/ranks.h"
#include "tests/support/tensors.h"

namespace snug::sync_batch_norm_test {
namespace {

using detail::Environment;
using ::testing::AllOf;
using testing::close_in_norm;
using ::testing::ElementsAre;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;

std::shared_ptr<ProcessGroup> group_of_one() { return init_process_group({.environment = Environment{}}); }

torch::Tensor data(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = torch::kDouble) {
  torch::manual_seed(seed);
  return torch::randn(sizes, dtype) * 3 + 2;
}

// One layer on the parts of `whole`, rank r's `sizes[r]` items, against torch's on all of it, in FP64.
void expect_as_one_process(at::IntArrayRef shape, const std::vector<int64_t>& sizes,
                           const torch::nn::BatchNormOptions& options) {
  on_ranks(static_cast<int>(sizes.size()), [&] {
    const auto group = init_process_group(quick());
    const auto part_of = [&](const torch::Tensor& whole) {
      return whole.split_with_sizes(sizes)[static_cast<size_t>(group->rank())];
    };
    torch::nn::BatchNorm2d reference(options);
    SyncBatchNorm norm(options, group);
    reference->to(torch::kDouble);
    norm->to(torch::kDouble);
    for (uint64_t step = 0; step < 3; ++step) {
      const auto all = data(shape, 1 + step).requires_grad_();
      const auto weights = data(shape, 7);
      const auto mine = part_of(all.detach()).clone().requires_grad_();
      const auto dims = all.dim() == 4;
      const auto expected =
          dims ? reference->forward(all) : reference->forward(all.unsqueeze(2).unsqueeze(3)).flatten(1);
      (expected.sin() * weights).sum().backward();
      const auto result = norm->forward(mine);
      (result.sin() * part_of(weights)).sum().backward();
      EXPECT_TRUE(close_in_norm(result, part_of(expected), 1e-12));
      EXPECT_TRUE(close_in_norm(mine.grad(), part_of(all.grad()), 1e-11));
    }
    if (options.affine()) {
      for (const auto& [ours, theirs] : {std::pair{norm->weight, reference->weight}, {norm->bias, reference->bias}}) {
        const auto sum = ours.grad().clone();
        group->all_reduce(sum);
        EXPECT_TRUE(close_in_norm(sum, theirs.grad(), 1e-12));
      }
    }
    if (options.track_running_stats()) {
      EXPECT_TRUE(close_in_norm(norm->running_mean, reference->running_mean, 1e-12));
      EXPECT_TRUE(close_in_norm(norm->running_var, reference->running_var, 1e-12));
      EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 3);
      norm->eval();
      reference->eval();
      norm->running_mean.copy_(reference->running_mean);
      norm->running_var.copy_(reference->running_var);
      const auto x = data({4, shape[1], 2, 2}, 9);
      EXPECT_TRUE(same_bits(norm->forward(x), reference->forward(x)));
    }
  });
}

TEST(SyncBatchNorm, NormalisesByAllRanksTogether) { expect_as_one_process({6, 5, 3, 4}, {3, 3}, {5}); }
TEST(SyncBatchNorm, CountsWhatEachRankHas) { expect_as_one_process({9, 4, 2, 2}, {1, 6, 2}, {4}); }
TEST(SyncBatchNorm, LetsARankHaveNothing) { expect_as_one_process({5, 4, 2, 2}, {2, 0, 3}, {4}); }
TEST(SyncBatchNorm, TakesRowsWithoutWeights) {
  expect_as_one_process({8, 3}, {3, 5}, torch::nn::BatchNormOptions(3).affine(false).eps(0.1));
}
TEST(SyncBatchNorm, AveragesCumulativelyWithoutMomentum) {
  expect_as_one_process({8, 3, 2, 2}, {4, 4}, torch::nn::BatchNormOptions(3).momentum(std::nullopt));
}
TEST(SyncBatchNorm, DoesWithoutRunningStatistics) {
  expect_as_one_process({8, 3, 2, 2}, {4, 4}, torch::nn::BatchNormOptions(3).track_running_stats(false));
}

TEST(SyncBatchNorm, RefusesWhatItCannotNormalise) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    SyncBatchNorm norm(torch::nn::BatchNormOptions(3), group);
    EXPECT_THAT(error_of<ConfigError>([&] { norm->forward(torch::zeros({group->rank(), 3})); }),
                HasSubstr("all 2 ranks together have 1 values"));
    EXPECT_THAT(error_of<ConfigError>([&] { norm->forward(torch::zeros({4, 2})); }), HasSubstr("[4, 2]"));
  });
}

ResNet tiny_resnet() {
  torch::manual_seed(5);
  return ResNet(ResNetOptions{.depth = 8, .widths = {4, 8, 8}, .shortcut = ResNetShortcut::Project});
}

torch::Tensor pictures() {
  torch::manual_seed(6);
  return torch::randn({8, 3, 8, 8}, torch::kDouble);
}

torch::Tensor mean_loss(ResNet& model, const torch::Tensor& x) {
  return torch::nn::functional::cross_entropy(model->forward(x),
                                              torch::arange(x.size(0)) % 2);  // the parts' targets are as the whole's
}

TEST(ConvertSyncBatchNorm, KeepsTheTensorsAndTheMode) {
  const auto group = group_of_one();
  auto model = tiny_resnet();
  auto same = tiny_resnet();
  const auto before = model->parameters();
  model->eval();
  const auto names = convert_sync_batch_norm(*model, group);
  EXPECT_EQ(names.size(), 9);  // stem, two in each of 3 blocks, 2 projections
  EXPECT_EQ(names.front(), "stem.norm");
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(model->parameters()[i].is_same(before[i]));
  }
  same->eval();
  EXPECT_TRUE(same_bits(model->forward(pictures().to(torch::kFloat)), same->forward(pictures().to(torch::kFloat))));
  model->train();
  same->train();
  EXPECT_TRUE(same_bits(model->forward(pictures().to(torch::kFloat)), same->forward(pictures().to(torch::kFloat))));
  EXPECT_TRUE(same_bits(model->buffers(), same->buffers()));
  const FrozenBatchNorm freezes_it_too(*model);
}

struct HoldsItsNormImpl : torch::nn::Module {
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(3));
};
TORCH_MODULE(HoldsItsNorm);

TEST(ConvertSyncBatchNorm, SaysWhatToWriteWhereItCannotReplace) {
  HoldsItsNorm model;
  EXPECT_THAT(error_of<ConfigError>([&] { convert_sync_batch_norm(*model, group_of_one()); }),
              AllOf(HasSubstr("'norm' is held by a member"), HasSubstr("snug::SyncBatchNorm norm{nullptr};")));
}

// Three steps of a ResNet on ranks and of one process with the whole batch, in FP64, where what is left is the order of
// sums. Without `synchronises` it normalises by running statistics.
void expect_resnet_as_one_process(int ranks, bool synchronises, bool checkpoints) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    auto whole = tiny_resnet();
    auto model = tiny_resnet();
    whole->to(torch::kDouble);
    model->to(torch::kDouble);
    if (synchronises) {
      convert_sync_batch_norm(*model, group);
    }
    if (checkpoints) {
      model->set_block_runner([](const auto& block, torch::Tensor x) { return checkpoint(block, std::move(x)); });
    }
    DataParallel ddp(model, group);
    const auto part = pictures().chunk(ranks)[static_cast<size_t>(group->rank())];
    AdamW adam(model->parameters(), {.lr = 1e-3});
    for (int step = 0; step < 3; ++step) {
      {
        const torch::NoGradGuard
            no_grad;  // the comparison is of each step's gradients, so both start at the same point
        for (size_t i = 0; i < whole->parameters().size(); ++i) {
          whole->parameters()[i].copy_(model->parameters()[i]);
        }
      }
      std::optional<FrozenBatchNorm> frozen, whole_frozen;
      if (!synchronises) {
        frozen.emplace(*model);
        whole_frozen.emplace(*whole);
      }
      whole->zero_grad();
      mean_loss(whole, pictures()).backward();
      adam.zero_grad();
      ddp.forward([&] { return mean_loss(model, part); }).backward();
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        EXPECT_TRUE(close_in_norm(gradients_of(*model)[i], gradients_of(*whole)[i], 1e-11))
            << "step " << step << ", " << i;
      }
      for (size_t i = 0; i < model->buffers().size(); ++i) {
        EXPECT_TRUE(close_in_norm(model->buffers()[i], whole->buffers()[i], 1e-12)) << "buffer " << i;
      }
      adam.step();
    }
  });
}

// ||a - b|| / ||b||, of tensors taken together.
double difference(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  double of_difference = 0;
  double of_b = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto exact = b[i].to(torch::kDouble);
    of_difference += (a[i].to(torch::kDouble) - exact).square().sum().item<double>();
    of_b += exact.square().sum().item<double>();
  }
  return std::sqrt(of_difference / of_b);
}

double largest_difference(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, difference({a[i]}, {b[i]}));
  }
  return largest;
}

// In FP32 ranks and one process round differently. Without BatchNorm's derivatives each tensor is within 1e-6. These
// subtract means from sums whose terms nearly cancel, so that one process alone is further than that from the same step
// in FP64, in a few tensors: there no two orders of summation agree to 1e-6. So with them the gradient as a whole is
// within 1e-6, and each tensor is as near to FP64 as one process's tensors are: twice as far at most, over several
// draws, as which of the two is the luckier is chance.
void expect_fp32_as_good_as_one_process(int ranks, bool synchronises) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    double of_one = 0;
    double of_ranks = 0;
    for (uint64_t draw = 0; draw < 3; ++draw) {
      auto whole = tiny_resnet();
      auto exact = tiny_resnet();
      auto model = tiny_resnet();
      exact->to(torch::kDouble);
      std::optional<FrozenBatchNorm> frozen[3];
      if (synchronises) {
        convert_sync_batch_norm(*model, group);
      } else {
        frozen[0].emplace(*whole);
        frozen[1].emplace(*exact);
        frozen[2].emplace(*model);
      }
      DataParallel ddp(model, group);
      torch::manual_seed(20 + draw);
      const auto x = torch::randn({8, 3, 8, 8});
      mean_loss(whole, x).backward();
      mean_loss(exact, x.to(torch::kDouble)).backward();
      ddp.forward([&] { return mean_loss(model, x.chunk(ranks)[static_cast<size_t>(group->rank())]); }).backward();
      const auto one = gradients_of(*whole);
      const auto many = gradients_of(*model);
      EXPECT_LT(synchronises ? difference(many, one) : largest_difference(many, one), 1e-6);
      of_one = std::max(of_one, largest_difference(one, gradients_of(*exact)));
      of_ranks = std::max(of_ranks, largest_difference(many, gradients_of(*exact)));
    }
    EXPECT_LT(of_ranks, 2 * of_one);
  });
}

TEST(SyncBatchNorm, RoundsOnTwoRanksInFp32AsOneProcessDoes) { expect_fp32_as_good_as_one_process(2, true); }
TEST(SyncBatchNorm, RoundsOnFourRanksInFp32AsOneProcessDoes) { expect_fp32_as_good_as_one_process(4, true); }
TEST(FrozenBatchNorm, RoundsOnTwoRanksInFp32AsOneProcessDoes) { expect_fp32_as_good_as_one_process(2, false); }

TEST(SyncBatchNorm, TrainsAResNetOnTwoRanksAsOneProcess) { expect_resnet_as_one_process(2, true, false); }
TEST(SyncBatchNorm, TrainsACheckpointedResNetOnFourRanksAsOneProcess) { expect_resnet_as_one_process(4, true, true); }
TEST(FrozenBatchNorm, TrainsAResNetOnTwoRanksAsOneProcess) { expect_resnet_as_one_process(2, false, true); }

}  // namespace
}  // namespace snug::sync_batch_norm_test
