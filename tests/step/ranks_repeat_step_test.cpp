// Where one of several ranks runs out of memory in a step, all make it again, or none has made it.

#include <functional>
#include <string>

#include "snug/distributed/sharded_optimizer.h"
#include "src/distributed/process_group_impl.h"
#include "tests/step/ranked_training.h"
#include "tests/support/failing_allocations.h"

namespace snug::ranks_repeat_step_test {
namespace {

using testing::AllocationSweep;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using testing::is_same_on_all;
using testing::kPlenty;
using testing::MakeOptimizer;
using testing::of_all_ranks;
using testing::on_rank_1;
using testing::RankedRun;
using testing::planned::make_batch;
using torch::Tensor;

enum class Fails { Anywhere, WithoutData, AfterForward };  // every one of those, but only some of all

FailingAllocation* of_this_round = nullptr;  // not yet while the reference trains

// No allocation fails from where it writes: a rank that fails while parameters are gathered is lost.
class FailsBeforeItWrites : public AdamW {
 public:
  using AdamW::AdamW;

 protected:
  std::function<void()> prepare(const Work& work) const override {
    return [write = AdamW::prepare(work)] {
      if (of_this_round != nullptr) {
        of_this_round->disarm();
      }
      write();
    };
  }
};

std::unique_ptr<torch::optim::Optimizer> sharded(const std::vector<Tensor>& parameters,
                                                 const std::shared_ptr<ProcessGroup>& group) {
  return std::make_unique<ShardedOptimizer>(parameters, group, [](const auto& groups) {
    return std::make_unique<FailsBeforeItWrites>(groups, AdamWOptions{.lr = 0.01});
  });
}

void expect_the_same_step_whichever_allocation_fails(Fails where, const StepperOptions& options,
                                                     const std::function<torch::nn::Sequential()>& make,
                                                     const MakeOptimizer& make_optimizer = testing::adamw) {
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    const Batch all = make_batch(128);
    const Batch own =
        where == Fails::WithoutData ? all.slice(0, group->rank() == 0 ? all.size() : 0) : share(all, *group);
    const auto seed_of = [&](int step) { torch::manual_seed(static_cast<uint64_t>(100 + 10 * step + group->rank())); };
    RankedRun reference(group, options, make(), make_optimizer);
    std::vector<std::vector<Tensor>> after;
    for (int i = 0; i < 4; ++i) {
      seed_of(i);
      reference.step(own);
      after.push_back(reference.state());
    }
    const StepperOptions within_budget = RankedRun::with_room(kPlenty, options);
    int64_t again = 0, dropped = 0;
    const AllocationSweep sweep = on_rank_1(*group, {.is_thinned = where == Fails::Anywhere});
    for_each_failing_allocation(sweep, [&](FailingAllocation& allocation) {
      of_this_round = &allocation;
      RankedRun run(group, within_budget, make(), make_optimizer);
      for (int i = 0; i < 2; ++i) {  // in the second one the buckets change
        seed_of(i);
        run.step(own);
      }
      seed_of(2);
      if (where == Fails::AfterForward) {
        run.at_backward = [&] { allocation.arm(); };
      } else {
        allocation.arm();
      }
      int64_t made = 1;
      try {
        again += run.step(own).step_downs;
      } catch (const BudgetExceeded&) {
        made = 0;
      }
      allocation.disarm();
      ASSERT_TRUE(is_same_on_all(*group, made));
      if (made == 0) {
        ++dropped;
        ASSERT_TRUE(same_bits(run.state(), after[1]));
        seed_of(2);
        run.step(own);
      }
      ASSERT_TRUE(same_bits(run.state(), after[2]));
      seed_of(3);
      run.step(own);
      ASSERT_TRUE(same_bits(run.state(), after[3])) << "the one after that";
    });
    EXPECT_TRUE(is_same_on_all(*group, again));
    if (where == Fails::WithoutData) {
      EXPECT_GT(dropped, 5) << "there is nothing to take less of";
    } else {
      EXPECT_GT(again, 5);
    }
    if (where == Fails::Anywhere) {
      EXPECT_EQ(dropped, 0) << "nothing is allocated outside of what is made again";
    }
  });
}

torch::nn::Sequential with_dropout() { return testing::make_mlp({32, 64, 64, 32}, 0.1); }

TEST(RanksRepeatAStep, TogetherWhicheverAllocationFailsOnOne) {
  expect_the_same_step_whichever_allocation_fails(Fails::Anywhere, {.micro_batch = 32}, with_dropout);
}

TEST(RanksRepeatAStep, TogetherWithBuffersToPutBack) {
  expect_the_same_step_whichever_allocation_fails(Fails::Anywhere, {.micro_batch = 64},
                                                  testing::planned::with_batch_norm);
}

TEST(RanksRepeatAStep, TogetherBeforeTheyAgreeOnItsScale) {
  expect_the_same_step_whichever_allocation_fails(Fails::AfterForward,
                                                  {.precision = Precision::Float16, .micro_batch = 64}, with_dropout);
}

const StepperOptions kMasters = {.precision = Precision::BFloat16, .weights = Weights::Low, .micro_batch = 64};

torch::nn::Sequential in_bfloat16() {
  auto model = with_dropout();
  model->to(torch::kBFloat16);
  return model;
}

TEST(RanksRepeatAStep, TogetherWithMasters) {
  expect_the_same_step_whichever_allocation_fails(Fails::Anywhere, kMasters, in_bfloat16);
}

TEST(RanksRepeatAStep, TogetherWithMastersOnARankWithoutData) {
  expect_the_same_step_whichever_allocation_fails(Fails::WithoutData, kMasters, in_bfloat16);
}

TEST(RanksRepeatAStep, TogetherWithAShardedOptimizer) {
  expect_the_same_step_whichever_allocation_fails(Fails::Anywhere, {.micro_batch = 64, .clip_norm = 0.1}, with_dropout,
                                                  sharded);
}

TEST(RanksRepeatAStep, TogetherWithAShardedOptimizerAndAScale) {
  expect_the_same_step_whichever_allocation_fails(
      Fails::AfterForward, {.precision = Precision::Float16, .micro_batch = 64, .clip_norm = 0.1}, with_dropout,
      sharded);
}

// `fails_in_trials`: also while the step is planned anew.
void expect_that_all_give_up(bool fails_in_trials, const std::string& told_by_itself,
                             const std::string& told_by_others) {
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    const Batch own = share(make_batch(64), *group);
    RankedRun run(group, RankedRun::with_room(kPlenty, {.micro_batch = 16}));
    run.step(own);
    const auto before = run.parameters();
    int calls = 0;
    const auto step = [&] {
      run.stepper->step(own, [&](const Batch& micro) {
        const bool is_trial = group->impl().rehearsals > 0;
        calls += is_trial ? 0 : 1;
        if (group->rank() == 1 && (fails_in_trials || !is_trial)) {
          torch::empty({2 * kPlenty}, torch::kByte);
        }
        return Loss::sum((run.model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
      });
    };
    EXPECT_THAT(error_of<BudgetExceeded>(step), HasSubstr(group->rank() == 1 ? told_by_itself : told_by_others));
    EXPECT_EQ(calls, fails_in_trials ? 1 : 4) << "once, and again under each plan that leaves more free";
    EXPECT_TRUE(same_bits(run.parameters(), before));
    EXPECT_TRUE(run.step(own).stepped());
  });
}

TEST(RanksRepeatAStep, OrGiveUpTogetherWhereOneRunsOutOfMemoryAgainAndAgain) {
  expect_that_all_give_up(/*fails_in_trials=*/false, "does not fit into the memory budget", "rank 1 ran out of memory");
}

TEST(RanksRepeatAStep, OrGiveUpTogetherWhereOneFindsNoOtherPlan) {
  expect_that_all_give_up(/*fails_in_trials=*/true, "no plan was found", "rank 1 found no way to make the step");
}

}  // namespace
}  // namespace snug::ranks_repeat_step_test
