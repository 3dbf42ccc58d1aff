#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/distributed/data_parallel.h"
#include "snug/distributed/sharded_optimizer.h"
#include "snug/optim/adamw.h"
#include "snug/optim/clip.h"
#include "snug/precision/grad_scaler.h"
#include "snug/step/stepper.h"
#include "tests/distributed/ranks.h"
#include "tests/support/freezing.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_model.h"

// ZeRO-2: gradients too are each rank's share.

namespace snug::sharded_gradients_test {
namespace {

using ::testing::AllOf;
using testing::bytes_of;
using testing::close_in_norm;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;
using torch::optim::OptimizerParamGroup;

const ShardedOptimizer::Factory kAdamW = [](const auto& groups) {
  return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
};

TEST(ShardedOptimizer, WithShardedGradientsFreesWhatIsNotItsOwn) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto rank = static_cast<size_t>(group->rank());
    const auto x = tiny_batch(12)[0].chunk(2)[rank];
    auto whole = tiny_model();
    auto model = tiny_model();
    const auto plain = kAdamW({OptimizerParamGroup(whole->parameters())});
    DataParallel ddp(whole, group);
    ShardedOptimizer sharded(model->parameters(), group, kAdamW, {.gradients = GradientSharding{.bucket = Bytes(600)}});
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad();
      sharded.zero_grad();
      ddp.forward([&] { return whole->forward(x).square().mean(); }).backward();
      model->forward(x).square().mean().backward();
      int64_t kept = 0;
      for (const auto& piece : sharded.param_groups()[0].params()) {
        kept += static_cast<int64_t>(piece.grad().nbytes());
      }
      EXPECT_NEAR(static_cast<double>(kept), static_cast<double>(bytes_of(model->parameters())) / 2, 64 * 4);
      for (const auto& parameter : model->parameters()) {
        EXPECT_FALSE(parameter.grad().defined());
      }
      const auto norm = clip_grad_norm_(whole->parameters(), 0.5);
      EXPECT_TRUE(close_in_norm(sharded.clip_grad_norm_(0.5), norm, 1e-6));
      plain->step();
      sharded.step();
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        EXPECT_TRUE(close_in_norm(model->parameters()[i], whole->parameters()[i], 1e-6));
      }
    }
  });
}

TEST(ShardedOptimizer, WithShardedGradientsAddsUpMicroBatchesAndTakesUnusedParametersForZero) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    const auto parts = tiny_batch(12)[0].chunk(6);
    auto whole = tiny_model();
    whole->forward(tiny_batch(12)[0]).square().mean().backward();
    auto model = tiny_model();
    auto parameters = model->parameters();
    parameters.push_back(torch::randn({200}).requires_grad_());  // no rank uses it
    ShardedOptimizer sharded(parameters, group, kAdamW, {.gradients = GradientSharding{.bucket = Bytes(600)}});
    for (size_t i = 0; i < 2; ++i) {
      (model->forward(parts[2 * static_cast<size_t>(group->rank()) + i]).square().mean() / 2).backward();
    }
    auto squares = torch::zeros({}, torch::kDouble);
    for (const auto& piece : sharded.param_groups()[0].params()) {
      squares += piece.grad().to(torch::kDouble).square().sum();
    }
    group->all_reduce(squares);
    EXPECT_TRUE(close_in_norm(squares.sqrt(), grad_norm(whole->parameters()), 1e-6));
  });
}

TEST(ShardedOptimizer, WithShardedGradientsSkipsOnAllRanksWhatOneFindsInfinite) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    for (const bool unscales_first : {false, true}) {
      auto model = tiny_model();
      const auto before = testing::clones_of(model->parameters());
      ShardedOptimizer sharded(model->parameters(), group, kAdamW, {.gradients = GradientSharding{}});
      GradScaler scaler({.init_scale = 8});
      scaler.agree_by(agree_over(group));
      scaler.scale(model->forward(tiny_batch(4)[0]).square().mean()).backward();
      if (group->rank() == 1) {
        sharded.param_groups()[0].params()[0].mutable_grad().fill_(INFINITY);
      }
      if (unscales_first) {
        scaler.unscale_(sharded);
      }
      EXPECT_FALSE(scaler.step(sharded));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 4);
      EXPECT_TRUE(same_bits(model->parameters(), before));
    }
  });
}

TEST(ShardedOptimizer, WithShardedGradientsTrainsWhatIsNotFrozenInEachPass) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto x = tiny_batch(12)[0].chunk(2)[static_cast<size_t>(group->rank())];
    for (const int first : {0, 1}) {  // what is unfrozen later may be frozen from the start
      auto whole = tiny_model();
      auto model = tiny_model();
      testing::freeze_for(first, *whole);
      testing::freeze_for(first, *model);
      const auto plain = kAdamW({OptimizerParamGroup(whole->parameters())});
      DataParallel ddp(whole, group);
      ShardedOptimizer sharded(model->parameters(), group, kAdamW,
                               {.gradients = GradientSharding{.bucket = Bytes(600)}});
      for (int step = first; step < testing::kFreezingSteps; ++step) {
        testing::freeze_for(step, *whole);
        testing::freeze_for(step, *model);
        plain->zero_grad();
        sharded.zero_grad();
        ddp.forward([&] { return whole->forward(x).square().mean(); }).backward();
        model->forward(x).square().mean().backward();
        for (const auto& parameter : model->parameters()) {
          EXPECT_FALSE(parameter.grad().defined());
        }
        plain->step();
        sharded.step();
        EXPECT_TRUE(same_bits(testing::clones_of(model->parameters()), testing::clones_of(whole->parameters())))
            << "step " << step;
      }
    }
  });
}

// The other rank waits for it where they agree on a skip.
TEST(ShardedOptimizer, WithShardedGradientsSkipsTogetherWhereAllThatOneRankHasIsFrozen) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const std::vector p = {torch::ones({128}).requires_grad_(), torch::ones({128}).requires_grad_()};
    ShardedOptimizer sharded(p, group, kAdamW, {.gradients = GradientSharding{}});
    GradScaler scaler({.init_scale = 8});
    scaler.agree_by(agree_over(group));
    p[0].set_requires_grad(false);
    for (const bool unscales_first : {false, true}) {
      for (const bool overflows : {false, true}) {
        sharded.zero_grad();
        scaler.scale((p[0] * p[1]).sum() * (overflows ? INFINITY : 1)).backward();
        if (unscales_first) {
          scaler.unscale_(sharded);
        }
        const auto before = testing::clones_of(p);
        EXPECT_EQ(scaler.step(sharded), !overflows);
        scaler.update();
        EXPECT_TRUE(same_bits(p[0].detach(), before[0]));
        EXPECT_EQ(same_bits(p[1].detach(), before[1]), overflows);
      }
    }
  });
}

TEST(ShardedOptimizer, WithShardedGradientsWantsAScalerToKnowHowRanksAgree) {
  on_ranks(1, [] {
    auto model = tiny_model();
    ShardedOptimizer sharded(model->parameters(), init_process_group(quick()), kAdamW,
                             {.gradients = GradientSharding{}});
    GradScaler scaler({.init_scale = 8});
    scaler.scale(model->forward(tiny_batch(4)[0]).square().mean()).backward();
    const auto words = HasSubstr("scaler.agree_by(snug::agree_over(group))");
    EXPECT_THAT(error_of<ConfigError>([&] { scaler.step(sharded); }), words);
    EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(sharded); }), words);
    scaler.agree_by([](const torch::Tensor& /*found_inf*/) {});
    EXPECT_TRUE(scaler.step(sharded));
  });
}

// Both send gradients once a step; this sends them in every backward.
TEST(ShardedOptimizer, WithShardedGradientsIsRefusedByStepperAndDataParallel) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    DataParallel ddp(model, group);
    const auto loss = [&] { return model->forward(tiny_batch(4)[0]).square().mean(); };
    {
      ShardedOptimizer sharded(model->parameters(), group, kAdamW, {.gradients = GradientSharding{}});
      EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, sharded); }), HasSubstr("(ZeRO-2)"));
      EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, sharded, {.data_parallel = &ddp}); }),
                  HasSubstr("(ZeRO-2)"));
      EXPECT_THAT(error_of<ConfigError>([&] { ddp.forward(loss); }),
                  AllOf(HasSubstr("'0.weight'"), HasSubstr("(ZeRO-2)")));
      const NoSync quiet(ddp);
      EXPECT_THAT(error_of<ConfigError>([&] { ddp.forward(loss); }), HasSubstr("(ZeRO-2)"));
      const torch::NoGradGuard no_grad;
      ddp.forward(loss);  // nothing is to be sent
    }
    ddp.forward(loss).backward();
    auto whole = tiny_model();
    whole->forward(tiny_batch(4)[0]).square().mean().backward();
    EXPECT_TRUE(same_bits(gradients_of(*model), gradients_of(*whole)));  // twice the same, halved
  });
}

}  // namespace
}  // namespace snug::sharded_gradients_test
