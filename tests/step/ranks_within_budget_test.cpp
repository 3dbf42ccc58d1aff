// A memory budget on several ranks: they split their shares alike, and stop together. What they make again is in
// ranks_repeat_step_test.cpp.

#include <algorithm>
#include <string>
#include <tuple>

#include "snug/distributed/sharded_optimizer.h"
#include "snug/distributed/sync_batch_norm.h"
#include "src/distributed/data_parallel_impl.h"
#include "src/distributed/rank_verdict.h"
#include "tests/step/ranked_training.h"
#include "tests/support/temporary_folder.h"

namespace snug::ranks_within_budget_test {
namespace {

using detail::AgreedSplit;
using detail::RankSplit;
using testing::is_same_on_all;
using testing::kPlenty;
using testing::of_all_ranks;
using testing::RankedRun;
using testing::settled_live;
using testing::planned::live;
using testing::planned::make_batch;
using torch::Tensor;

// The least room that a step of the batch has a plan in.
int64_t least_room(const std::shared_ptr<ProcessGroup>& group, const Batch& own, int64_t micro_batch) {
  for (int64_t room = 256 << 10;; room += room / 4) {
    const StepperOptions options = RankedRun::with_room(room, {.micro_batch = micro_batch});
    RankedRun tight(group, options);
    try {
      tight.step(own);
      return room;
    } catch (const BudgetExceeded& error) {
      if (error.smallest_feasible().count() > 0) {
        return error.smallest_feasible().count() - options.budget.memory.count() + room;
      }
    }
  }
}

// Between what a share takes in small parts and at once.
int64_t room_for_parts(const std::shared_ptr<ProcessGroup>& group, const Batch& own) {
  const int64_t in_parts = least_room(group, own, 0);
  const int64_t at_once = least_room(group, own, own.size());
  EXPECT_GT(at_once, in_parts + in_parts / 4);
  return in_parts + (at_once - in_parts) / 4;
}

// Takes the rest of kPlenty there while it lives.
Tensor leave_rank_one(const ProcessGroup& group, int64_t room) {
  return group.rank() == 1 ? torch::zeros({kPlenty - room}, torch::kByte) : Tensor();
}

// --- what the numbers mean

TEST(RanksWithinABudget, SplitAsTheOneThatHasToCutMost) {
  constexpr int64_t kWhole = RankSplit::kWhole;
  const auto agreed = [](const std::vector<RankSplit>& ranks) {
    const AgreedSplit all = detail::agree(ranks);
    return std::tuple(all.at_most, all.largest_batch, all.is_settled);
  };
  EXPECT_EQ(agreed({{kWhole, 8, true}, {kWhole, 7, true}}), std::tuple(kWhole, 8, true));
  EXPECT_EQ(agreed({{kWhole, 8, true}, {kWhole, 7, false}}), std::tuple(kWhole, 8, false)) << "one has to plan";
  EXPECT_EQ(agreed({{4, 8, true}, {kWhole, 7, true}}), std::tuple(4, 8, false)) << "the other is to cut as well";
  EXPECT_EQ(agreed({{4, 8, true}, {kWhole, 3, true}}), std::tuple(4, 8, true)) << "it has less than that";
  EXPECT_EQ(agreed({{4, 8, true}, {2, 8, true}}), std::tuple(2, 8, false));
  EXPECT_EQ(agreed({{4, 8, true}, {4, 3, true}, {kWhole, 0, true}}), std::tuple(4, 8, true));
}

// --- they agree

TEST(RanksWithinABudget, TakeTheMicroBatchOfTheOneThatHasLeastRoom) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(1024), *group);
    const int64_t tight = room_for_parts(group, own);
    const StepperOptions options = RankedRun::with_room(kPlenty);
    const Tensor ballast = leave_rank_one(*group, tight);
    RankedRun run(group, options);
    int64_t items = 0;
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(run.step(own).step_downs, 0);
      EXPECT_LT(run.items(), own.size());
      EXPECT_TRUE(is_same_on_all(*group, run.items()));
      EXPECT_TRUE(i == 0 || run.items() == items) << "and stay with it";
      items = run.items();
    }
    RankedRun plain(group, {.micro_batch = items});
    for (int i = 0; i < 3; ++i) {
      plain.step(own);
    }
    EXPECT_TRUE(same_bits(run.parameters(), plain.parameters()));
  });
}

TEST(RanksWithinABudget, TakeThePlansOfAnEarlierProgramAndMakeThoseThatARankHasLost) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const testing::TemporaryFolder folder;
    const Batch own = share(make_batch(1024), *group);
    const StepperOptions options =
        RankedRun::with_room(room_for_parts(group, own), {.budget = {.plan_folder = folder.path()}});
    struct Outcome {
      int64_t calls, micro_batches, items;
      bool is_read;
      std::vector<double> losses;  // no tensors, which would be alive in the next one
    };
    const auto two_steps = [&] {
      RankedRun run(group, options);
      const StepResult first = run.step(own);
      const Outcome after_one{run.calls, first.micro_batches, run.items(), !run.stepper->plan()->read_from.empty(), {}};
      EXPECT_TRUE(is_same_on_all(*group, run.items()));
      Outcome outcome = after_one;
      outcome.losses = {first.loss(), run.step(own).loss()};
      return outcome;
    };
    const Outcome first = two_steps();
    const int64_t micro_batches = (own.size() + first.items - 1) / first.items;
    EXPECT_GT(first.calls, micro_batches);
    const Outcome second = two_steps();
    EXPECT_TRUE(second.is_read);
    EXPECT_EQ(second.calls, micro_batches);
    if (group->rank() == 1) {
      std::filesystem::remove_all(folder.path());
    }
    const Outcome third = two_steps();
    EXPECT_EQ(third.is_read, group->rank() == 0);
    for (const Outcome& later : {second, third}) {
      EXPECT_EQ(later.items, first.items);
      EXPECT_EQ(later.losses, first.losses);
    }
  });
}

TEST(RanksWithinABudget, TakeTheSmallestBudgetOfAll) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(64), *group);
    const int64_t smallest = settled_live() + kPlenty;
    const StepperOptions options{.budget = {.memory = group->rank() == 1 ? Bytes(smallest) : Bytes::unlimited()}};
    RankedRun run(group, options);
    run.step(own);
    const auto budgets = of_all_ranks(*group, smallest);
    ASSERT_TRUE(run.stepper->plan());
    EXPECT_EQ(run.stepper->plan()->budget_bytes, budgets[1]);

    EXPECT_THAT(error_of<BudgetExceeded>([&] {
                  const Tensor ballast = torch::zeros({group->rank() == 1 ? 2 * kPlenty : 1}, torch::kByte);
                  RankedRun(group, options);
                }),
                HasSubstr("alive on rank 1"));
    EXPECT_THAT(error_of<ConfigError>([&] {
                  RankedRun(group, {.budget = {.memory = options.budget.memory, .plan = group->rank() == 0}});
                }),
                HasSubstr("ranks 0 and 1 do not both plan"));
  });
}

TEST(RanksWithinABudget, StopTogetherWhereOneHasNoDirectoryForOffload) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const testing::TemporaryFolder folder;
    const bool is_bad = group->rank() == 1;
    StepperOptions options = RankedRun::with_room(kPlenty);
    options.budget.offload = is_bad ? folder / "missing" : folder.path();
    EXPECT_THAT(error_of<Error>([&] { RankedRun(group, options); }),
                HasSubstr(is_bad ? "cannot make a file in" : "rank 1 cannot use its directory for offload"));
    options.budget.offload = folder.path();
    EXPECT_TRUE(RankedRun(group, options).step(share(make_batch(64), *group)).stepped());
  });
}

// `text` of rank 0.
std::string from_rank_zero(ProcessGroup& group, std::string text) {
  Tensor bytes = torch::zeros({4096}, torch::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<uint8_t>());
  group.broadcast({bytes});
  const std::string all(reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()), 4096);
  return all.substr(0, all.find('\0'));
}

TEST(RanksWithinABudget, MakeTheSameStepsAfterARestartFromWhatRankZeroSaved) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch all = make_batch(1024);
    const Batch own = group->rank() == 0 ? all.slice(0, 500) : all.slice(500, 1024);
    const int64_t room = room_for_parts(group, own);
    const StepperOptions options = RankedRun::with_room(kPlenty);
    Tensor ballast = leave_rank_one(*group, room);  // the larger share has the less room
    RankedRun run(group, options);
    run.step(own);
    const int64_t items = run.items();
    StateDict saved = run.stepper->state_dict();
    saved.set("micro_batches", from_rank_zero(*group, saved.get<std::string>("micro_batches")));
    const auto parameters = run.parameters();
    const StateDict of_optimizer = dynamic_cast<AdamW&>(*run.optimizer).state_dict();

    ballast = Tensor();
    RankedRun resumed(group, RankedRun::with_room(kPlenty));  // where they would choose otherwise
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) {
        resumed.model->parameters()[i].copy_(parameters[i]);
      }
    }
    dynamic_cast<AdamW&>(*resumed.optimizer).load_state_dict(of_optimizer);
    resumed.stepper->load_state_dict(saved);
    resumed.step(own);
    EXPECT_EQ(resumed.items(), items);
    run.step(own);
    EXPECT_TRUE(same_bits(resumed.parameters(), run.parameters()));
  });
}

TEST(RanksWithinABudget, MayHaveNoData) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch all = make_batch(64);
    RankedRun run(group, RankedRun::with_room(kPlenty));
    for (const int64_t of_zero : {64, 0, 32}) {
      const Batch own = group->rank() == 0 ? all.slice(0, of_zero) : all.slice(of_zero, 64);
      const StepResult result = run.step(own);
      EXPECT_TRUE(result.stepped());
      EXPECT_EQ(result.batch_items, 64);
      EXPECT_EQ(run.stepper->plan().has_value(), own.size() > 0);
    }
    EXPECT_FALSE(run.step(all.slice(0, 0)).stepped());
    EXPECT_TRUE(same_bits(group->all_gather(run.model->parameters()[0])[0], run.model->parameters()[0].detach()));
  });
}

TEST(RanksWithinABudget, PlanAModelThatSendsInForward) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(1000 + group->rank()), *group);
    const auto make = [&] {
      auto model = testing::planned::with_batch_norm();
      convert_sync_batch_norm(*model, group);
      return model;
    };
    RankedRun plain(group, {}, make());
    const int64_t before = settled_live();
    const int64_t peak = plain.step(own).peak_bytes - before;
    RankedRun planned(group, {.budget = {.memory = Bytes(settled_live() + peak * 3 / 4)}}, make());
    EXPECT_TRUE(planned.step(own).stepped());
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(same_bits(planned.state(), plain.state())) << "step " << i;
      plain.step(own);
      const StepResult result = planned.step(own);
      EXPECT_EQ(result.step_downs, 0);
      EXPECT_EQ(result.plan_deviation, "");
      EXPECT_LE(result.peak_bytes, planned.stepper->plan()->choice.peak_bytes);
    }
    EXPECT_TRUE(planned.stepper->plan()->activations) << "something is computed again";
  });
}

TEST(RanksWithinABudget, TrainOnItemsOfWhichEachAloneTakesFourTimesTheBudget) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch both = testing::planned::two_large_items();
    const Batch own = both.slice(group->rank(), group->rank() + 1);
    RankedRun plain(group, {}, testing::planned::very_deep());
    plain.step(own);
    const int64_t activations = plain.step(own).activation_peak_bytes;
    const int64_t budget = settled_live() + activations / 4;
    RankedRun planned(group, {.budget = {.memory = Bytes(budget)}}, testing::planned::very_deep());
    for (int i = 0; i < 2; ++i) {
      const StepResult result = planned.step(own);
      EXPECT_EQ(result.step_downs, 0);
      EXPECT_LE(result.peak_bytes, budget);
    }
    EXPECT_TRUE(same_bits(planned.state(), plain.state()));
  });
}

TEST(RanksWithinABudget, PlanALossThatSendsAMetric) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(1024), *group);
    const int64_t tight = room_for_parts(group, own);
    const StepperOptions options = RankedRun::with_room(kPlenty);
    const Tensor ballast = leave_rank_one(*group, tight);  // which then tries smaller and smaller parts, alone
    RankedRun run(group, options);
    Tensor metric;
    const auto result = run.stepper->step(own, [&](const Batch& micro) {
      const Tensor output = run.model->forward(micro[0]);
      metric = torch::ones({});
      group->all_reduce(metric);
      return Loss::sum((output - micro[1]).pow(2).sum(), micro[1].numel());
    });
    EXPECT_TRUE(result.stepped());
    EXPECT_LT(run.items(), own.size());
    EXPECT_EQ(metric.item<float>(), 2) << "sent in the step, where all do it equally often";
  });
}

// --- they stop together

TEST(RanksWithinABudget, StopTogetherWhereOneFindsNoPlan) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(1024), *group);
    const int64_t least = least_room(group, own, 0);
    const StepperOptions options = RankedRun::with_room(kPlenty);
    RankedRun run(group, options);
    const auto before = run.parameters();
    Tensor ballast = leave_rank_one(*group, least * 9 / 10);
    try {
      run.step(own);
      ADD_FAILURE() << "less than the least";
    } catch (const BudgetExceeded& error) {
      EXPECT_THAT(error.what(), HasSubstr(group->rank() == 1 ? "no plan was found" : "rank 1 found no way"));
      EXPECT_GT(error.smallest_feasible(), options.budget.memory);
      EXPECT_TRUE(is_same_on_all(*group, error.smallest_feasible().count()));
    }
    EXPECT_TRUE(same_bits(run.parameters(), before));
    ballast = Tensor();
    EXPECT_TRUE(run.step(own).stepped());
  });
}

TEST(RanksWithinABudget, StopTogetherWhereTwoFindNoPlanAndNameThem) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(1536), *group);
    const int64_t least = least_room(group, own, 0);
    RankedRun run(group, RankedRun::with_room(kPlenty));
    for (const bool all_know : {true, false}) {
      const Tensor ballast = torch::zeros({group->rank() > 0 ? kPlenty - least / 2 : 1}, torch::kByte);
      try {
        if (group->rank() == 2 && !all_know) {
          run.stepper->step(own,
                            [](const Batch& /*micro*/) -> Loss { throw BudgetExceeded("no room, nobody knows why"); });
        }
        run.step(own);
        ADD_FAILURE() << "two of them have no room";
      } catch (const BudgetExceeded& error) {
        const auto would_do = of_all_ranks(*group, error.smallest_feasible().count());
        if (group->rank() == 0) {
          EXPECT_THAT(error.what(), HasSubstr("ranks 1, 2 found no way"));
          EXPECT_THAT(error.what(),
                      HasSubstr(all_know ? "would do there" : "their own messages are on their standard error"));
          EXPECT_EQ(would_do[0], all_know ? std::max(would_do[1], would_do[2]) : 0);
        }
      }
    }
    EXPECT_TRUE(run.step(own).stepped());
  });
}

TEST(RanksWithinABudget, StopTogetherWhereOneFailsWhileItPlans) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(64), *group);
    RankedRun run(group, RankedRun::with_room(kPlenty));
    const auto fail = [&] {
      run.stepper->step(own, [&](const Batch& /*micro*/) -> Loss { throw std::runtime_error("a bad picture"); });
    };
    if (group->rank() == 1) {
      EXPECT_THAT(error_of<std::runtime_error>(fail), HasSubstr("a bad picture"));
    } else {
      EXPECT_THAT(error_of<DistributedError>([&] { run.step(own); }), HasSubstr("rank 1 failed in this step"));
    }
    EXPECT_TRUE(run.step(own).stepped());
  });
}

// --- what optimizers need

TEST(RanksWithinABudget, CountBuckets) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    for (const bool as_view : {true, false}) {
      auto model = testing::make_mlp({32, 256, 256, 256, 256, 256, 256, 32});
      DataParallel ddp(model, group,
                       {.bucket = Bytes(bytes_of(model->parameters()) / 6), .gradient_as_bucket_view = as_view});
      AdamW optimizer(model->parameters());
      Stepper stepper(
          model, optimizer,
          {.micro_batch = 8, .budget = {.memory = Bytes(live() + 3 * kPlenty)}, .ranks = {.data_parallel = &ddp}});
      for (int i = 0; i < 3; ++i) {
        const StepResult result = stepper.step(share(make_batch(32), *group), [&](const Batch& micro) {
          return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
        });
        EXPECT_LE(result.peak_bytes, stepper.plan()->choice.peak_bytes) << "step " << i;
        EXPECT_EQ(result.step_downs, 0);
      }
    }
  });
}

TEST(RanksWithinABudget, CountWhatAShardedOptimizerGathersIn) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = testing::make_mlp({32, 256, 256, 256, 32});
    DataParallel ddp(model, group, {.gradient_as_bucket_view = false});
    ShardedOptimizer optimizer(model->parameters(), group,
                               [](const auto& groups) { return std::make_unique<AdamW>(groups, AdamWOptions{}); });
    EXPECT_EQ(optimizer.workspace_bytes(), bytes_of(model->parameters()));  // of two ranks
    Stepper stepper(
        model, optimizer,
        {.micro_batch = 8, .budget = {.memory = Bytes(live() + kPlenty)}, .ranks = {.data_parallel = &ddp}});
    for (int i = 0; i < 3; ++i) {
      const StepResult result = stepper.step(share(make_batch(16), *group), [&](const Batch& micro) {
        return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
      });
      EXPECT_LE(result.peak_bytes, stepper.plan()->choice.peak_bytes) << "step " << i;
      EXPECT_GT(result.peak_bytes, stepper.plan()->choice.peak_bytes - optimizer.workspace_bytes() -
                                       ddp.impl().bucket_bytes_in_backward());
    }
  });
}

}  // namespace
}  // namespace snug::ranks_within_budget_test
