#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/sgd.h"
#include "src/distributed/launch_environment.h"
#include "tests/distributed/ranks.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::join_test {
namespace {

using detail::Environment;
using testing::close_in_norm;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;

torch::Tensor sum_of_losses(torch::nn::Sequential& model, const torch::Tensor& x) {
  return model->forward(x).square().sum();
}

// Rank r of 3 has r + 1 batches of 3 - r items. The reference does with all of a step's items what they do together.
void expect_the_gradients_of_all_items(DataParallelOptions options, double bound) {
  on_ranks(3, [&] {
    const auto group = init_process_group(quick());
    options.reduction = Reduction::Sum;
    options.bucket = Bytes(600);
    auto whole = tiny_model();
    auto model = tiny_model();
    DataParallel ddp(model, group, options);
    Join join(group, model->parameters());
    SGD whole_sgd(whole->parameters(), {.lr = 0.01});
    SGD sgd(model->parameters(), {.lr = 0.01});
    int64_t step = 0;
    for (;; ++step) {
      std::vector<torch::Tensor> of_all;
      std::optional<torch::Tensor> mine;
      for (int64_t rank = step; rank < 3; ++rank) {
        of_all.push_back(tiny_batch(3 - rank, static_cast<uint64_t>(10 * step + rank))[0]);
        if (rank == group->rank()) {
          mine = of_all.back();
        }
      }
      const int64_t items = join.next(mine ? mine->size(0) : 0);
      if (items == 0) {
        break;
      }
      const auto everything = torch::cat(of_all);
      ASSERT_EQ(items, everything.size(0));
      sgd.zero_grad();
      const auto loss =
          ddp.forward([&] { return mine ? sum_of_losses(model, *mine) / static_cast<double>(items) : join.nothing(); });
      loss.backward();
      sgd.step();
      whole_sgd.zero_grad();
      (sum_of_losses(whole, everything) / static_cast<double>(items)).backward();
      whole_sgd.step();
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        EXPECT_TRUE(close_in_norm(model->parameters()[i].grad(), whole->parameters()[i].grad(), bound));
      }
    }
    EXPECT_EQ(step, 3);
  });
}

TEST(Join, GivesTheGradientOfAllItemsWhenRanksRunOut) { expect_the_gradients_of_all_items({}, 1e-6); }
TEST(Join, GoesWithAStaticGraph) { expect_the_gradients_of_all_items({.static_graph = true}, 1e-6); }
TEST(Join, GoesWithASearchForUnusedParameters) {
  expect_the_gradients_of_all_items({.find_unused_parameters = true}, 1e-6);
}
TEST(Join, GoesWithCompression) { expect_the_gradients_of_all_items({.hook = bfloat16_hook()}, 2e-2); }

TEST(Join, AddsNothingWhateverTheParametersAre) {
  const auto group = init_process_group({.environment = Environment{}});
  const auto wild = torch::tensor({INFINITY, NAN, 1.0F}).requires_grad_();
  const auto frozen = torch::ones({2});
  const auto nothing = Join(group, {wild, frozen}).nothing();
  EXPECT_EQ(nothing.item<float>(), 0);
  nothing.backward();
  EXPECT_TRUE(same_bits(wild.grad(), torch::zeros({3})));
  EXPECT_FALSE(frozen.grad().defined());
}

TEST(Join, RefusesWhatIsNoCount) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    Join join(group, {torch::zeros({1}).requires_grad_()});
    EXPECT_EQ(join.next(2 + group->rank()), 9);
    EXPECT_THAT(error_of<ConfigError>([&] { join.next(-1); }), HasSubstr("less than 0")) << "on all";
    EXPECT_THAT(error_of<ConfigError>([&] { join.next(group->rank() == 0 ? -1 : 100); }), HasSubstr("less than 0"));
    EXPECT_THAT(error_of<ConfigError>([&] { Join(group, {torch::zeros({1})}); }), HasSubstr("no parameter"));
  });
}

}  // namespace
}  // namespace snug::join_test
