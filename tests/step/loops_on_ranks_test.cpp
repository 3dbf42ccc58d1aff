// before_update, metrics and several optimizers on several ranks. loops_test.cpp has the same alone.

#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "snug/distributed/sharded_optimizer.h"
#include "tests/step/ranked_training.h"

namespace snug::loops_on_ranks_test {
namespace {

using testing::RankedRun;
using torch::Tensor;

using Named = std::vector<std::pair<std::string, Tensor>>;

TEST(BeforeUpdateOnRanks, SeesTheGradientsOfAllRanks) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    std::vector<Tensor> seen;
    StepperOptions options{.clip_norm = 0.05, .before_update = [&](const Named& parameters) {
                             seen.clear();
                             for (const auto& [name, parameter] : parameters) {
                               parameter.grad().clamp_(-0.01, 0.01);
                               seen.push_back(parameter.grad().clone());
                               parameter.grad().add_(torch::randn_like(parameter), 1e-4);
                             }
                           }};
    const Batch batch = tiny_batch(9);
    for (const Precision precision : {Precision::Float32, Precision::Float16}) {
      options.precision = precision;
      options.sixteen_bit = {.scaler = {.init_scale = 64}};
      Training alone(nullptr, options);
      options.micro_batch = 2;
      options.ranks.check_replicas_every = 1;
      Training run(group, options);
      for (uint64_t step = 0; step < 3; ++step) {
        torch::manual_seed(step);
        alone.step(batch);
        const std::vector<Tensor> of_all = seen;
        torch::manual_seed(step);
        EXPECT_TRUE(run.step(share(batch, *group)).stepped());
        EXPECT_TRUE(close_in_norm(seen, of_all, precision == Precision::Float32 ? 1e-6 : 1e-2));
      }
      EXPECT_TRUE(same_bits(group->all_gather(run.model->parameters()[0])[0], run.model->parameters()[0].detach()));
      options = {.clip_norm = 0.05, .before_update = options.before_update};
    }
  });
}

TEST(BeforeUpdateOnRanks, IsHeardIfItFailsOnOneRank) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    bool fails = group->rank() == 1;
    Training run(group, {.before_update = [&](const Named&) {
                   if (std::exchange(fails, false)) {
                     throw std::runtime_error("mine");
                   }
                 }});
    const Batch own = share(tiny_batch(8), *group);
    const auto before = run.parameters();
    const auto step = [&] { run.step(own); };
    if (group->rank() == 1) {
      EXPECT_EQ(error_of<std::runtime_error>(step), "mine");
    } else {
      EXPECT_THAT(error_of<DistributedError>(step), HasSubstr("rank 1 failed in this step"));
    }
    EXPECT_TRUE(same_bits(run.parameters(), before));
    EXPECT_TRUE(run.step(own).stepped());
  });
}

// Allocates before it writes. Not GradientScalingAware, so the scaler leaves its steps out.
struct Promising : torch::optim::SGD, UpdateAware {
  using SGD::SGD;
  bool before_writing(std::function<void()> hook) override {
    hook_ = std::move(hook);
    return true;
  }
  Tensor step(LossClosure /*closure*/ = nullptr) override {
    if (const auto hook = std::exchange(hook_, nullptr)) {
      hook();
    }
    return SGD::step();
  }
  std::function<void()> hook_;
};

TEST(BeforeUpdateOnRanks, IsHeardIfItFailsWhereTheScalerLeavesOutTheUpdate) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    bool fails = group->rank() == 1;
    StepperOptions options{.precision = Precision::Float16,
                           .sixteen_bit = {.scaler = {.init_scale = 0x1p120}},
                           .before_update = [&](const Named&) {
                             if (std::exchange(fails, false)) {
                               throw std::runtime_error("mine");
                             }
                           }};
    Training run(group, options, tiny_model(), [](const auto& parameters, const auto&) {
      return std::make_unique<Promising>(parameters, torch::optim::SGDOptions(0.1));
    });
    const Batch own = share(tiny_batch(8), *group);
    const auto step = [&] { run.step(own); };
    if (group->rank() == 1) {
      EXPECT_EQ(error_of<std::runtime_error>(step), "mine");
    } else {
      EXPECT_THAT(error_of<DistributedError>(step), HasSubstr("rank 1 failed in this step"));
    }
    EXPECT_FALSE(run.step(own).stepped());
  });
}

// The loss function of a Training, with a metric of each item and one of each call.
StepResult step_with_metrics(Training& run, const Batch& batch) {
  return run.stepper->step(batch, [&](const Batch& micro) {
    return run.loss_of(micro).with("first", micro[1].sum()).with("of all", torch::full({}, micro[1].numel()));
  });
}

TEST(MetricsOnRanks, AreThoseOfTheWholeBatchOnRanksWithoutItemsToo) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    Training alone;
    Training run(group, {.micro_batch = 2});
    const Batch batch = tiny_batch(9);
    const std::vector<int64_t> ends[] = {{1, 6, 9}, {0, 2, 9}, {9, 9, 9}};  // another in each step
    for (const auto& end : ends) {
      const auto rank = static_cast<size_t>(group->rank());
      const StepResult one = step_with_metrics(alone, batch);
      const StepResult result = step_with_metrics(run, batch.slice(rank == 0 ? 0 : end[rank - 1], end[rank]));
      EXPECT_NEAR(result.loss(), one.loss(), 1e-6);
      EXPECT_NEAR(result.metric("first"), one.metric("first"), 1e-6);
      EXPECT_EQ(result.metric("of all"), 1);
    }
    EXPECT_TRUE(std::isnan(step_with_metrics(run, batch.slice(0, 0)).metric("first")));
  });
}

TEST(MetricsOnRanks, HaveTheSameBitsWithinABudget) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(testing::planned::make_batch(512), *group);
    const auto train = [&](StepperOptions options, int64_t& peak) {
      options.micro_batch = 128;
      RankedRun run(group, options);
      std::vector<double> metrics;
      for (int i = 0; i < 2; ++i) {
        const StepResult result = step_with_metrics(run, own);
        peak = std::max(peak, result.peak_bytes);
        metrics.insert(metrics.end(), {result.loss(), result.metric("first"), result.metric("of all")});
      }
      return metrics;
    };
    int64_t peak = 0, lower = 0;
    const auto plain = train({}, peak);
    EXPECT_EQ(train({.budget = {.memory = Bytes(peak - (96 << 10))}}, lower), plain);
    EXPECT_LE(lower, peak - (96 << 10));
  });
}

TEST(MetricsOnRanks, ThatDifferAreRefusedOnAll) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    Training run(group);
    const Batch own = share(tiny_batch(8), *group);
    for (const bool has_one : {true, false}) {
      const auto step = [&] {
        run.stepper->step(own, [&](const Batch& micro) {
          const Loss loss = run.loss_of(micro);
          return group->rank() == 0 ? loss.with("mine", loss.value())
                 : has_one          ? loss.with("other", loss.value())
                                    : loss;
        });
      };
      EXPECT_THAT(error_of<ConfigError>(step), HasSubstr("the losses of ranks 0 and 1 have different metrics"));
    }
    EXPECT_EQ(step_with_metrics(run, own).metric("of all"), 1);
  });
}

// One of the two is sharded, so its update sends while the other one has yet to write.
TEST(SeveralOptimizersOnRanks, HaveTheBitsOfOneWithTwoGroups) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto train = [&](bool two) {
      auto model = tiny_model();
      DataParallel parallel(model, group);
      const std::vector<Tensor> all = model->parameters(), first(all.begin(), all.begin() + 2),
                                second(all.begin() + 2, all.end());
      const auto make = [](const std::vector<torch::optim::OptimizerParamGroup>& groups) {
        return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01});
      };
      ShardedOptimizer sharded(second, group, make);
      AdamW of_first(first, {.lr = 0.01}), of_all(all, {.lr = 0.01});
      Stepper stepper(
          model,
          two ? std::vector<torch::optim::Optimizer*>{&of_first, &sharded}
              : std::vector<torch::optim::Optimizer*>{&of_all},
          {.micro_batch = 2, .clip_norm = 0.05, .ranks = {.data_parallel = &parallel, .check_replicas_every = 1}});
      for (int i = 0; i < 3; ++i) {
        stepper.step(share(tiny_batch(9), *group),
                     [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); });
      }
      return clones_of(model->parameters());
    };
    EXPECT_TRUE(same_bits(train(true), train(false)));
    auto model = tiny_model();
    const std::vector<Tensor> all = model->parameters();
    ShardedOptimizer sharded({all[0], all[1]}, group, [](const auto& groups) {
      return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01});
    });
    AdamW rest({all[2]}, {.lr = 0.01});
    EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, {&rest, &sharded}); }), HasSubstr("give data_parallel"));
    DataParallel parallel(model, group);
    torch::optim::SGD writes_at_once({all[2]}, 0.01);
    EXPECT_THAT(error_of<ConfigError>(
                    [&] { Stepper(model, {&writes_at_once, &sharded}, {.ranks = {.data_parallel = &parallel}}); }),
                HasSubstr("only optimizers that allocate before they write"));
    EXPECT_THAT(error_of<ConfigError>([&] { Stepper(all, rest, {.ranks = {.data_parallel = &parallel}}); }),
                HasSubstr("data_parallel needs a module"));
  });
}

}  // namespace
}  // namespace snug::loops_on_ranks_test
