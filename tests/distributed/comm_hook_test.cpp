#include "snug/distributed/comm_hook.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/distributed/data_parallel.h"
#include "snug/distributed/detail/data_parallel_impl.h"
#include "snug/distributed/power_sgd.h"
#include "tests/distributed/ranks.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::comm_hook_test {
namespace {

using testing::bytes_of;
using testing::close_in_norm;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::is_true_on_any;
using testing::on_rank_1;
using testing::on_ranks;
using testing::quick;
using testing::tiny_batch;
using testing::tiny_model;

void expect_half_the_bytes(const CommHook& hook, double bound) {
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    const auto part = tiny_batch(12)[0].chunk(2)[static_cast<size_t>(group->rank())];
    auto exact = tiny_model();
    auto model = tiny_model();
    DataParallel exact_ddp(exact, group, {.bucket = Bytes(600)});
    DataParallel ddp(model, group, {.bucket = Bytes(600), .hook = hook});
    for (int step = 1; step <= 3; ++step) {
      exact->zero_grad();
      model->zero_grad();
      exact_ddp.forward([&] { return exact->forward(part).square().mean(); }).backward();
      ddp.forward([&] { return model->forward(part).square().mean(); }).backward();
      EXPECT_EQ(exact_ddp.bytes_reduced(), step * bytes_of(model->parameters()));
      EXPECT_EQ(2 * ddp.bytes_reduced(), exact_ddp.bytes_reduced());
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        EXPECT_TRUE(close_in_norm(gradients_of(*model)[i], gradients_of(*exact)[i], bound));
      }
    }
  });
}

TEST(CommHook, Float16HalvesTheBytes) { expect_half_the_bytes(float16_hook(), 1e-3); }
TEST(CommHook, Bfloat16HalvesTheBytes) { expect_half_the_bytes(bfloat16_hook(), 8e-3); }

TEST(CommHook, MayBeAnyFunction) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    std::vector<std::string> calls;
    size_t parameters = 0;
    DataParallel ddp(model, group, {.bucket = Bytes(600), .hook = [&](const GradientBucket& bucket, ProcessGroup& g) {
                                      calls.push_back("start " + std::to_string(bucket.index));
                                      parameters += bucket.parameters.size();
                                      EXPECT_EQ(bucket.gradients.numel() * 4, bytes_of(bucket.parameters));
                                      return [&calls, bucket, wait = g.start_all_reduce(bucket.gradients)] {
                                        wait();
                                        calls.push_back("end " + std::to_string(bucket.index));
                                        bucket.gradients.fill_(7);
                                      };
                                    }});
    ddp.forward([&] { return model->forward(tiny_batch(4)[0]).square().mean(); }).backward();
    EXPECT_EQ(parameters, 6U);
    ASSERT_GE(calls.size(), 4U);
    EXPECT_EQ(calls.front(), "start 0");
    EXPECT_EQ(calls[calls.size() / 2], "end 0");
    for (const auto& gradient : gradients_of(*model)) {
      EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, 7)));
    }
  });
}

GradientBucket bucket_of(const torch::Tensor& matrix, const torch::Tensor& vector) {
  return {0, torch::cat({matrix.flatten(), vector}), {matrix, vector}};
}

torch::Tensor reduce(const CommHook& hook, const GradientBucket& bucket, ProcessGroup& group) {
  const auto copy = bucket.gradients.clone();
  hook({bucket.index, copy, bucket.parameters}, group)();
  return copy;
}

// The gradients of rank r are (r + 1) * a b^T: their sum has rank one.
TEST(PowerSgd, LosesNothingOfAMatrixOfItsRank) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    torch::manual_seed(1);
    const auto matrix = torch::randn({20, 1}).matmul(torch::randn({1, 30}));
    const auto bucket = bucket_of(matrix * (group->rank() + 1), torch::arange(5.0F));
    const auto hook = power_sgd_hook({.rank = 1, .start_step = 2});
    const auto sum = torch::cat({matrix.flatten() * 3, torch::arange(5.0F) * 2});
    for (int step = 0; step < 4; ++step) {
      const int64_t before = group->traffic().all_reduce;
      EXPECT_TRUE(close_in_norm(reduce(hook, bucket, *group), sum, 1e-5)) << step;
      EXPECT_EQ(group->traffic().all_reduce - before, step < 2 ? 4 * (600 + 5) : 4 * (20 + 30 + 5));
    }
  });
}

// Of a matrix of full rank each step sends a part; with feedback the parts add up to the whole.
TEST(PowerSgd, MakesUpForWhatItLost) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    torch::manual_seed(static_cast<uint64_t>(group->rank()));
    const auto bucket = bucket_of(torch::randn({12, 30}), torch::randn({5}));
    auto sum = bucket.gradients.clone();
    group->all_reduce(sum);
    const auto error = [&](bool feedback) {
      const auto hook = power_sgd_hook({.rank = 2, .start_step = 2, .error_feedback = feedback});
      auto total = torch::zeros_like(sum);
      constexpr int kSteps = 60;
      for (int step = 0; step < kSteps + 2; ++step) {
        const auto result = reduce(hook, bucket, *group);
        total += step < 2 ? torch::zeros_like(result) : result;
      }
      return ((total / kSteps - sum).norm() / sum.norm()).item<double>();
    };
    EXPECT_LT(error(true), 0.15);
    EXPECT_GT(error(false), 0.5);
  });
}

TEST(PowerSgd, ForgetsAnInfiniteGradient) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    torch::manual_seed(1);
    const auto matrix = torch::randn({20, 1}).matmul(torch::randn({1, 30}));
    for (const float wrong : {INFINITY, NAN}) {
      for (const bool feedback : {true, false}) {
        const auto hook = power_sgd_hook({.start_step = 2, .error_feedback = feedback});
        auto bucket = bucket_of(matrix, torch::ones({5}));
        const auto good = bucket.gradients.clone();
        for (int step = 0; step < 8; ++step) {
          const bool is_good = step != 4;
          if (group->rank() == 1) {
            bucket.gradients[7] = is_good ? good[7] : torch::tensor(wrong);
          }
          const auto result = reduce(hook, bucket, *group);
          EXPECT_EQ(result.isfinite().all().item<bool>(), is_good) << step;
          EXPECT_TRUE(!is_good || close_in_norm(result, 2 * good, 1e-5)) << step;
        }
      }
    }
  });
}

// As the Reducer does after its first pass, and after a step that was dropped.
TEST(PowerSgd, CarriesEachParametersErrorToWhicheverBucketItIsIn) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    torch::manual_seed(1 + static_cast<uint64_t>(group->rank()));
    const std::vector<torch::Tensor> parameters = {torch::randn({12, 12}), torch::randn({12, 12}),
                                                   torch::randn({9, 16}), torch::randn({5})};
    using Layout = std::vector<std::vector<size_t>>;
    const auto train = [&](const std::vector<Layout>& layouts) {
      const auto hook = power_sgd_hook({.start_step = 1});
      std::vector<torch::Tensor> sums;
      for (const Layout& layout : layouts) {
        sums.assign(parameters.size(), {});
        for (size_t i = 0; i < layout.size(); ++i) {
          std::vector<torch::Tensor> flat, own;
          for (const size_t p : layout[i]) {
            flat.push_back(parameters[p].flatten());
            own.push_back(parameters[p]);
          }
          const auto sum = reduce(hook, {i, torch::cat(flat), own}, *group);
          int64_t offset = 0;
          for (const size_t p : layout[i]) {
            sums[p] = sum.narrow(0, offset, parameters[p].numel());
            offset += parameters[p].numel();
          }
        }
      }
      return sums;
    };
    const Layout one = {{0, 1, 2, 3}};
    const auto expected = train({one, one, one, one, one, one});
    const auto found = train({one, one, {{1, 0}, {3, 2}}, {{0}, {1}, {2}, {3}}, {{2, 1, 3, 0}}, {{3, 1}, {2, 0}}});
    for (size_t p = 0; p < parameters.size(); ++p) {
      EXPECT_TRUE(close_in_norm(found[p], expected[p], 1e-5)) << p;  // products round as their operands lie in memory
    }
  });
}

// What a Stepper does in a step, here with a loss of its own: false if one of the ranks ran out of memory, so that all
// drop it.
bool makes_step(DataParallel& ddp, torch::nn::Sequential& model, const torch::Tensor& part,
                FailingAllocation& allocation) {
  model->zero_grad();
  ddp.impl().begin_step();
  const bool failed =
      allocation.stops([&] { ddp.forward([&] { return model->forward(part).square().mean(); }).backward(); });
  if (failed) {
    ddp.impl().send_zeros();
  }
  if (is_true_on_any(ddp.group(), failed)) {
    ddp.impl().start_over();
    return false;
  }
  ddp.impl().end_step();
  return true;
}

TEST(PowerSgd, StaysInStepWhicheverAllocationFailsOnOneRank) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto part = tiny_batch(12)[0].chunk(2)[static_cast<size_t>(group->rank())];
    int64_t dropped = 0;
    for_each_failing_allocation(on_rank_1(*group, {.is_thinned = true}), [&](FailingAllocation& allocation) {
      FailingAllocation none(0);
      auto model = tiny_model();
      DataParallel ddp(model, group,
                       {.bucket = Bytes(600), .hook = power_sgd_hook({.start_step = 1, .min_compression = 1})});
      for (int step = 0; step < 3; ++step) {  // in the second one the buckets change
        ASSERT_TRUE(makes_step(ddp, model, part, none));
      }
      dropped += makes_step(ddp, model, part, allocation) ? 0 : 1;
      for (int step = 0; step < 2; ++step) {
        ASSERT_TRUE(makes_step(ddp, model, part, none));
      }
      for (const auto& gradient : gradients_of(*model)) {
        EXPECT_TRUE(gradient.isfinite().all().item<bool>());
        const auto all = group->all_gather(gradient.contiguous());
        EXPECT_TRUE(torch::equal(all[0], all[1]));
      }
    });
    EXPECT_GT(dropped, 20);
  });
}

TEST(PowerSgd, TrainsAsWellAsExactGradients) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto train = [&](const CommHook& hook) {
      auto model = tiny_model();
      DataParallel ddp(model, group, {.hook = hook});
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      const auto batch = tiny_batch(32);
      const auto rank = static_cast<size_t>(group->rank());
      double last = 0;
      for (int step = 0; step < 100; ++step) {
        optimizer.zero_grad();
        const auto loss = ddp.forward(
            [&] { return (model->forward(batch[0].chunk(2)[rank]) - batch[1].chunk(2)[rank]).square().mean(); });
        loss.backward();
        optimizer.step();
        last = loss.item<double>();
      }
      return last;
    };
    const double exact = train({});
    EXPECT_LT(train(power_sgd_hook({.start_step = 2})), 1.5 * exact + 0.01);
  });
}

TEST(PowerSgd, RefusesOptionsThatCannotWork) {
  EXPECT_THAT(error_of<ConfigError>([] { power_sgd_hook({.rank = 0}); }), HasSubstr("rank is 0"));
  EXPECT_THAT(error_of<ConfigError>([] { power_sgd_hook({.start_step = -1}); }), HasSubstr("start_step -1"));
}

}  // namespace
}  // namespace snug::comm_hook_test
