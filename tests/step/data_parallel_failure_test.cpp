// A step that fails on one rank: nobody waits, all drop it, and the next one works.

#include "snug/memory.h"
#include "src/memory/cpu_allocator.h"
#include "tests/step/ranked_training.h"

namespace snug::data_parallel_failure_test {
namespace {

constexpr int64_t kLarge = 1 << 24;

void take_too_much() {
  const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + kLarge / 2));
  torch::empty({kLarge});
}

enum class When { Before, FirstForward, FirstBackward, LastForward, LastBackward };

class FailingRun {
 public:
  explicit FailingRun(DataParallelOptions parallel = {}, Bytes budget = Bytes::unlimited())
      : group_(init_process_group(quick())),
        model_(tiny_model()),
        ddp_(model_, group_, std::move(parallel)),
        optimizer_(model_->parameters(), torch::optim::SGDOptions(0.1)),
        stepper_(model_, optimizer_,
                 {.micro_batch = 2, .budget = {.memory = budget, .plan = false}, .ranks = {.data_parallel = &ddp_}}) {}

  // Of 4 micro-batches; on rank 1 `fail` is called at that moment.
  StepResult step(When when, const std::function<void()>& fail) {
    const bool fails = group_->rank() == 1 && fail;
    const Batch own = share(tiny_batch(8 * group_->size()), *group_);
    int micro_batches = 0;
    return stepper_.step(own, [&](const Batch& micro) {
      const bool is_it = ++micro_batches == (when == When::LastForward || when == When::LastBackward ? 4 : 1);
      const auto failing = [fail](const torch::Tensor& gradient) {
        fail();
        return gradient;
      };
      if (fails && is_it && (when == When::FirstForward || when == When::LastForward)) {
        fail();
      }
      auto hidden = micro[0];
      for (size_t i = 0; i < 3; ++i) {
        hidden = forward(i, hidden);
      }
      if (fails && is_it && (when == When::FirstBackward || when == When::LastBackward)) {
        hidden.register_hook(failing);  // when some buckets are under way
      }
      for (size_t i = 3; i < 6; ++i) {
        hidden = forward(i, hidden);
      }
      return squared_error(hidden, micro[1]);
    });
  }

  void expect_a_good_step() {
    auto alone = tiny_model();
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < alone->parameters().size(); ++i) {
        alone->parameters()[i].copy_(model_->parameters()[i]);
      }
    }
    const Batch all = tiny_batch(8 * group_->size());
    ((alone->forward(all[0]) - all[1]).square().sum() / static_cast<double>(all[1].numel())).backward();
    EXPECT_TRUE(step(When::Before, {}).stepped());
    for (size_t i = 0; i < alone->parameters().size(); ++i) {
      EXPECT_TRUE(close_in_norm(gradients_of(*model_)[i], gradients_of(*alone)[i], 1e-6));
    }
  }

  ProcessGroup& group() { return *group_; }
  torch::nn::Sequential& model() { return model_; }
  Stepper& stepper() { return stepper_; }

 private:
  torch::Tensor forward(size_t i, const torch::Tensor& x) {
    if (auto linear = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model_->ptr(i))) {
      return linear->forward(x);
    }
    return i == 2 ? x : x.tanh();
  }

  std::shared_ptr<ProcessGroup> group_;
  torch::nn::Sequential model_;
  DataParallel ddp_;
  torch::optim::SGD optimizer_;
  Stepper stepper_;
};

void expect_that_all_drop_the_step(DataParallelOptions parallel = {}) {
  FailingRun run(std::move(parallel));
  for (const When when : {When::FirstForward, When::FirstBackward, When::LastForward, When::LastBackward}) {
    for (int good_steps = 0; good_steps < 2; ++good_steps) {
      const auto before = clones_of(run.model()->parameters());
      if (run.group().rank() == 1) {
        EXPECT_THROW(run.step(when, take_too_much), c10::OutOfMemoryError);
      } else {
        EXPECT_THAT(error_of<BudgetExceeded>([&] { run.step(when, take_too_much); }),
                    HasSubstr("rank 1 ran out of memory, so all ranks dropped this step"));
      }
      EXPECT_TRUE(same_bits(clones_of(run.model()->parameters()), before));
      EXPECT_FALSE(run.model()->parameters()[0].grad().defined());
      for (int i = 0; i < good_steps; ++i) {
        run.expect_a_good_step();
      }
    }
  }
}

TEST(StepperOnRanksFails, TogetherWhenOneRunsOutOfMemory) {
  on_ranks(3, [] { expect_that_all_drop_the_step(); });
}

TEST(StepperOnRanksFails, TogetherWithManyBuckets) {
  on_ranks(2, [] { expect_that_all_drop_the_step({.bucket = Bytes(300), .gradient_as_bucket_view = false}); });
}

TEST(StepperOnRanksFails, TogetherWhereUnusedParametersAreLookedFor) {
  on_ranks(2, [] { expect_that_all_drop_the_step({.bucket = Bytes(300), .find_unused_parameters = true}); });
}

TEST(StepperOnRanksFails, TogetherWhenTheBatchDoesNotFitIntoOnesBudget) {
  on_ranks(2, [] {
    const bool is_tight = testing::this_rank() == 1;
    FailingRun run({}, is_tight ? Bytes(live_bytes(torch::kCPU).count() + kLarge / 2) : Bytes::unlimited());
    EXPECT_THAT(error_of<BudgetExceeded>([&] { run.step(When::LastForward, [] { torch::empty({kLarge}); }); }),
                HasSubstr(is_tight ? "does not fit into the memory budget" : "rank 1 ran out of memory"));
    run.expect_a_good_step();
  });
}

TEST(StepperOnRanksFails, TogetherWithAnyException) {
  on_ranks(3, [] {
    FailingRun run;
    const auto fail = [] { throw std::runtime_error("a bad picture"); };
    for (const When when : {When::FirstForward, When::LastBackward}) {
      if (run.group().rank() == 1) {
        EXPECT_THAT(error_of<std::runtime_error>([&] { run.step(when, fail); }), HasSubstr("a bad picture"));
      } else {
        EXPECT_THAT(error_of<DistributedError>([&] { run.step(when, fail); }),
                    HasSubstr("rank 1 failed in this step, so all ranks dropped it"));
      }
      run.expect_a_good_step();
    }
  });
}

// An optimizer that cannot step on rank 1.
class Stubborn : public torch::optim::SGD {
 public:
  Stubborn(std::vector<torch::Tensor> parameters, bool fails)
      : torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(0.1)), fails_(fails) {}
  torch::Tensor step(LossClosure closure = nullptr) override {
    if (std::exchange(fails_, false)) {
      throw std::runtime_error("no");
    }
    return torch::optim::SGD::step(closure);
  }

 private:
  bool fails_;
};

class WatchedSgd : public torch::optim::SGD {
 public:
  explicit WatchedSgd(std::vector<torch::Tensor> parameters)
      : torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(0.1)) {}
  torch::Tensor step(LossClosure closure = nullptr) override {
    auto loss = torch::optim::SGD::step(closure);
    if (after_step) {
      after_step();
    }
    return loss;
  }
  std::function<void()> after_step;
};

TEST(StepperOnRanksFails, SaysThatARankDidNotMakeAStepThatTheOthersMadeUntilASnapshotIsLoaded) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    DataParallel ddp(model, group);
    Stubborn optimizer(model->parameters(), group->rank() == 1);
    Stepper stepper(model, optimizer, {.ranks = {.data_parallel = &ddp}});
    const auto snapshot = clones_of(model->parameters());
    const StateDict state = stepper.state_dict();
    const auto step = [&] {
      stepper.step(tiny_batch(4),
                   [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); });
    };
    if (group->rank() == 1) {
      EXPECT_THROW(step(), std::runtime_error);
    } else {
      step();
    }
    EXPECT_THAT(error_of<DistributedError>(step), AllOf(HasSubstr("rank 1"), HasSubstr("go on from a snapshot")));
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < snapshot.size(); ++i) {
        model->parameters()[i].copy_(snapshot[i]);
      }
    }
    stepper.load_state_dict(state);
    step();
    ddp.check_replicas();
  });
}

TEST(StepperOnRanksFails, TogetherWhereTooManyStepsAreSkippedAndNobodyIsBehind) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    testing::Training run(group,
                          {.precision = Precision::Float16, .sixteen_bit = {.scaler = {.max_consecutive_skips = 1}}});
    const auto step = [&](double factor) {
      return run.stepper->step(tiny_batch(4), [&](const Batch& micro) {
        return Loss::sum(run.model->forward(micro[0]).to(torch::kFloat).sum() * factor, micro.size());
      });
    };
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(error_of<NonFinite>([&] { step(INFINITY); }), HasSubstr("skipped"));
      EXPECT_TRUE(step(1).stepped()) << "all have skipped the last one";
    }
    run.ddp->check_replicas();
  });
}

TEST(StepperOnRanksFails, TogetherWhereOneCannotReadItsParametersAndNobodyIsBehind) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    torch::nn::Conv2d model(torch::nn::Conv2dOptions(2, 4, 3));
    model->weight.set_data(model->weight.contiguous(torch::MemoryFormat::ChannelsLast));  // to be copied for a checksum
    DataParallel ddp(model, group);
    WatchedSgd optimizer(model->parameters());
    Stepper stepper(model, optimizer, {.ranks = {.data_parallel = &ddp, .check_replicas_every = 1}});
    const auto step = [&] {
      return stepper.step({torch::ones({2, 2, 4, 4})}, [&](const Batch& micro) {
        const auto output = model->forward(micro[0]);
        return Loss::sum(output.square().sum(), output.numel());
      });
    };
    step();
    optimizer.after_step = [&] { detail::fail_allocation_after(group->rank() == 1 ? 1 : 0); };
    if (group->rank() == 1) {
      EXPECT_THROW(step(), c10::OutOfMemoryError);
    } else {
      EXPECT_THAT(error_of<DistributedError>(step), HasSubstr("rank 1 could not"));
    }
    optimizer.after_step = nullptr;
    EXPECT_TRUE(step().stepped()) << "all have made the last one";
  });
}

class KilledRank : public ::testing::TestWithParam<When> {};

TEST_P(KilledRank, OfEightIsNamedByTheOthers) {
  on_ranks(8, [] {
    FailingRun run;
    run.expect_a_good_step();
    if (GetParam() == When::Before && run.group().rank() == 1) {
      ::_exit(0);
    }
    EXPECT_THAT(error_of<DistributedError>([&] {
                  for (;;) {
                    run.step(GetParam(), [] { ::_exit(0); });
                  }
                }),
                HasSubstr("rank 1 has died"));
  });
}

INSTANTIATE_TEST_SUITE_P(InEachPhaseOfAStep, KilledRank,
                         ::testing::Values(When::Before, When::FirstForward, When::FirstBackward, When::LastForward,
                                           When::LastBackward));

TEST(StepperOnRanksFails, AndNamesARankThatHasFewerBatchesAndDoesNotSaySo) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick(std::chrono::seconds(2)));
    auto model = tiny_model();
    DataParallel ddp(model, group);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    Stepper stepper(model, optimizer, {.ranks = {.data_parallel = &ddp}});
    const auto step = [&] {
      stepper.step(tiny_batch(4),
                   [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); });
    };
    step();
    if (group->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(8));
    } else {
      EXPECT_THAT(error_of<DistributedError>(step), HasSubstr("; rank 1 is alive, and has not come to this call"));
    }
  });
}

TEST(StepperOnRanksFails, AndNamesARankWhoseProcessIsStopped) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick(std::chrono::seconds(2)));
    if (group->rank() == 1) {
      ::kill(::getpid(), SIGSTOP);
      return;
    }
    EXPECT_THAT(error_of<DistributedError>([&] { group->barrier(); }), HasSubstr("rank 1 has died, hangs"));
    // Else its parent would wait for it.
    std::ifstream children(fmt::format("/proc/{}/task/{}/children", ::getppid(), ::getppid()));
    for (pid_t child = 0; children >> child;) {
      if (child != ::getpid()) {
        ::kill(child, SIGCONT);
      }
    }
  });
}

}  // namespace
}  // namespace snug::data_parallel_failure_test
