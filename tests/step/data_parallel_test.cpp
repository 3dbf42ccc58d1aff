#include "snug/distributed/data_parallel.h"

#include <chrono>
#include <thread>

#include "program/models/gpt.h"
#include "snug/distributed/sync_batch_norm.h"
#include "snug/loader.h"
#include "src/memory/operator_mode.h"
#include "tests/step/ranked_training.h"
#include "tests/support/freezing.h"

namespace snug::data_parallel_test {
namespace {

Gpt tiny_gpt() {
  torch::manual_seed(3);
  return Gpt(GptOptions{.vocab = 32, .context = 8, .layers = 2, .heads = 2, .width = 16});
}

// Of sequences that have unequal numbers of tokens: a target of -1 does not count.
Batch sequences(int64_t items) {
  torch::manual_seed(4);
  const auto tokens = torch::randint(32, {items, 8});
  const auto length = torch::randint(1, 8, {items, 1});
  return {tokens, torch::where(torch::arange(8).unsqueeze(0) < length, tokens.roll(-1, 1), torch::full({1}, -1))};
}

void expect_gradients_of_the_whole_batch(int ranks, int64_t micro_batch) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    const Batch batch = sequences(13);
    auto whole = tiny_gpt();
    auto model = tiny_gpt();
    DataParallel ddp(model, group);
    torch::optim::SGD of_whole(whole->parameters(), 0.01);
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    Stepper alone(whole, of_whole);
    Stepper stepper(model, optimizer, {.micro_batch = micro_batch, .ranks = {.data_parallel = &ddp}});
    for (int i = 0; i < 3; ++i) {  // the buckets change after the first
      const auto run = [&](Gpt& gpt, Stepper& by, const Batch& part) {
        return by.step(part, [&](const Batch& micro) {
          const auto logits = gpt->forward(micro[0]).reshape({-1, 32});
          return Loss::sum(at::cross_entropy_loss(logits, micro[1].reshape({-1}), {}, at::Reduction::Sum, -1),
                           (micro[1] >= 0).sum());
        });
      };
      const StepResult one = run(whole, alone, batch);
      const StepResult many = run(model, stepper, share(batch, *group));
      EXPECT_TRUE(close_in_norm(gradients_of(*model), gradients_of(*whole), 1e-6));
      EXPECT_EQ(many.items, one.items);
      EXPECT_NEAR(many.loss(), one.loss(), 1e-6 * one.loss());
      EXPECT_NEAR(many.grad_norm(), one.grad_norm(), 1e-5 * one.grad_norm());
    }
  });
}

TEST(StepperOnRanks, GivesTwoTheGradientsOfTheWholeBatch) { expect_gradients_of_the_whole_batch(2, 2); }
TEST(StepperOnRanks, GivesThreeTheGradientsOfTheWholeBatch) { expect_gradients_of_the_whole_batch(3, 0); }
TEST(StepperOnRanks, GivesFourTheGradientsOfTheWholeBatch) { expect_gradients_of_the_whole_batch(4, 1); }

void expect_gradients_of_512(int ranks, int64_t micro_batches) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    const Batch batch = tiny_batch(512);
    Training alone;
    alone.step(batch);
    Training run(group, {.micro_batch = 512 / ranks / micro_batches});
    EXPECT_EQ(run.step(share(batch, *group)).micro_batches, micro_batches);
    EXPECT_TRUE(close_in_norm(gradients_of(*run.model), gradients_of(*alone.model), 1e-6));
  });
}

TEST(StepperOnRanks, FourTimesOneMicroBatchIsTheBatchOf512) { expect_gradients_of_512(4, 1); }
TEST(StepperOnRanks, TwoTimesTwoMicroBatchesAreTheBatchOf512) { expect_gradients_of_512(2, 2); }
TEST(StepperOnRanks, OneTimesFourMicroBatchesAreTheBatchOf512) { expect_gradients_of_512(1, 4); }

TEST(StepperOnRanks, TakesUnequalSharesAndNone) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    Training alone;
    Training run(group, {.micro_batch = 2});
    const Batch batch = tiny_batch(9);
    const std::vector<int64_t> ends[] = {{1, 6, 9}, {0, 2, 9}, {9, 9, 9}, {3, 3, 9}};  // another in each step
    for (const auto& end : ends) {
      const auto rank = static_cast<size_t>(group->rank());
      const StepResult one = alone.step(batch);
      const StepResult result = run.step(batch.slice(rank == 0 ? 0 : end[rank - 1], end[rank]));
      EXPECT_TRUE(result.stepped());
      EXPECT_EQ(result.items, one.items);
      EXPECT_TRUE(close_in_norm(gradients_of(*run.model), gradients_of(*alone.model), 1e-6));
    }
    EXPECT_FALSE(run.step(batch.slice(0, 0)).stepped());  // nobody has any
    EXPECT_TRUE(same_bits(group->all_gather(run.model->parameters()[0])[0], run.model->parameters()[0].detach()));
  });
}

// Three items for two ranks: the last batch has one.
TEST(StepperOnRanks, TakesEveryBatchOfALoader) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto source = ItemSource::of_tensors(tiny_batch(3).tensors());
    Training alone;
    Training run(group, {});
    Loader whole(source, {.batch = 2});
    Loader loader(source, {.batch = 2, .rank = group->rank(), .ranks = group->size()});
    while (const auto batch = loader.next()) {
      const StepResult one = alone.step(Batch(*whole.next()));
      EXPECT_EQ(run.step(Batch(*batch)).items, one.items);
      EXPECT_TRUE(close_in_norm(gradients_of(*run.model), gradients_of(*alone.model), 1e-6));
    }
  });
}

TEST(StepperOnRanks, TakesCountsThatAreWholeTogether) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch batch = tiny_batch(4);
    const auto weights = torch::tensor({0.25, 1.25, 0.5, 1.0});  // 1.5 on each rank
    const auto step = [&](Training& run, const Batch& items, const torch::Tensor& of_items) {
      return run.stepper->step({items[0], items[1], of_items}, [&](const Batch& micro) {
        const auto errors = (run.model->forward(micro[0]) - micro[1]).square().sum(-1);
        return Loss::sum((errors * micro[2]).sum(), micro[2].sum());
      });
    };
    Training alone;
    Training run(group, {.micro_batch = 1});
    EXPECT_EQ(step(alone, batch, weights).items, 3);
    EXPECT_EQ(step(run, share(batch, *group), share({weights}, *group)[0]).items, 3);
    EXPECT_TRUE(close_in_norm(gradients_of(*run.model), gradients_of(*alone.model), 1e-6));
    EXPECT_THAT(error_of<ConfigError>([&] { step(run, share(batch, *group), torch::full({2}, 0.6)); }),
                HasSubstr("count is 2.4"));
  });
}

TEST(StepperOnRanks, SendsOnceAStep) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    Training run(group, {.micro_batch = 2});
    const int64_t gradients = bytes_of(run.model->parameters());
    for (int i = 0; i < 2; ++i) {
      const StepResult result = run.step(share(tiny_batch(16), *group));
      EXPECT_EQ(result.micro_batches, 4);
      EXPECT_EQ(result.bytes_sent, gradients);
      EXPECT_GT(result.communication_seconds, 0);
      EXPECT_GE(result.communication_waited, 0);
    }
  });
}

TEST(StepperOnRanks, AccumulatesAndSendsWithTheLastOrAtTheFlush) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch batch = tiny_batch(12);
    Training alone;
    Training run(group, {.accumulate = {.every = 4}});
    const auto add = [&](int64_t i) {
      return run.stepper->accumulate(share(batch, *group).slice(2 * i, 2 * i + 2),
                                     [&](const Batch& micro) { return run.loss_of(micro); });
    };
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_FALSE(add(i));
    }
    alone.step(batch);
    EXPECT_EQ(run.stepper->flush()->items, batch[1].numel());
    EXPECT_TRUE(close_in_norm(gradients_of(*run.model), gradients_of(*alone.model), 1e-6));
    for (const int64_t i : {0, 1, 2}) {
      EXPECT_FALSE(add(i));
    }
    EXPECT_TRUE(add(0));
  });
}

// The parameters after three steps with 16-bit weights, of a batch that is shared out, or alone where there is no
// group.
template <class Forward>
std::vector<torch::Tensor> after_low_steps(const std::shared_ptr<ProcessGroup>& group, torch::nn::Sequential model,
                                           int64_t micro_batch, const Forward& forward) {
  const Batch batch = tiny_batch(8);
  std::optional<DataParallel> ddp;
  if (group) {
    ddp.emplace(model, group);
  }
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer,
                  {.precision = Precision::BFloat16,
                   .weights = Weights::Low,
                   .micro_batch = micro_batch,
                   .ranks = {.data_parallel = ddp ? &*ddp : nullptr, .check_replicas_every = group ? 1 : 0}});
  int64_t bytes = 0;
  for (const auto& [name, full] : stepper.full_precision_parameters()) {
    bytes += static_cast<int64_t>(full.nbytes());
  }
  for (int i = 0; i < 3; ++i) {
    const auto result = stepper.step(group ? share(batch, *group) : batch, [&](const Batch& micro) {
      return squared_error(forward(model, micro[0].to(torch::kBFloat16)), micro[1]);
    });
    EXPECT_EQ(result.bytes_sent, group ? bytes : 0);
  }
  return clones_of(model->parameters());
}

TEST(StepperOnRanks, SumsTheFp32GradientsOfLowWeights) {
  on_ranks(2, [] {
    const auto train = [&](const std::shared_ptr<ProcessGroup>& group) {
      auto model = tiny_model();
      model->to(torch::kBFloat16);
      return after_low_steps(group, model, 4, [](auto& of, const torch::Tensor& x) { return of->forward(x); });
    };
    EXPECT_TRUE(same_bits(train(init_process_group(quick())), train(nullptr)));
  });
}

// A norm often stays FP32 where weights are 16-bit; its gradient goes the way of the masters'.
TEST(StepperOnRanks, SumsTheGradientsOfFp32ParametersAmongLowWeights) {
  on_ranks(2, [] {
    const auto train = [&](const std::shared_ptr<ProcessGroup>& group) {
      torch::manual_seed(1);
      torch::nn::Linear first(6, 16), last(16, 2);
      torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({16}));
      first->to(torch::kBFloat16);
      last->to(torch::kBFloat16);
      return after_low_steps(group, torch::nn::Sequential(first, norm, last), 2, [&](auto&, const torch::Tensor& x) {
        return last->forward(norm->forward(first->forward(x).to(torch::kFloat)).to(torch::kBFloat16));
      });
    };
    EXPECT_TRUE(close_in_norm(train(init_process_group(quick())), train(nullptr), 1e-6));
  });
}

// Before buckets are made anew, which the ranks do together, and in any later step.
TEST(StepperOnRanks, RefuseToFreezeOtherParametersAndGoOnWhenTheyAreTheSameAgain) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    for (const int steps_before : {0, 1, 2}) {
      for (const bool is_in_model : {true, false}) {
        auto model = tiny_model();
        auto temperature = torch::ones({2}, torch::requires_grad());
        auto parameters = model->parameters();
        parameters.push_back(temperature);
        DataParallel ddp(model, group);
        torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
        Stepper stepper(model, optimizer, {.ranks = {.data_parallel = &ddp, .check_replicas_every = 1}});
        const auto step = [&] {
          return stepper.step(share(tiny_batch(8), *group), [&](const Batch& micro) {
            return squared_error(model->forward(micro[0]) * temperature, micro[1]);
          });
        };
        for (int i = 0; i < steps_before; ++i) {
          step();
        }
        const auto before = clones_of(parameters);
        const auto& some = is_in_model ? parameters[3] : temperature;
        some.set_requires_grad(group->rank() == 0);
        for (int i = 0; i < 2; ++i) {
          EXPECT_THAT(error_of<ConfigError>(step),
                      AllOf(HasSubstr("ranks differ"), HasSubstr(is_in_model ? "'3.bias'" : "besides the model's")));
        }
        EXPECT_TRUE(same_bits(clones_of(parameters), before));
        for (const bool is_trained : {false, true}) {
          some.set_requires_grad(is_trained);
          for (int i = 0; i < 3; ++i) {
            EXPECT_TRUE(step().stepped());
          }
        }
      }
    }
  });
}

// A step that fails leaves the buckets to be made anew.
TEST(StepperOnRanks, MayFreezeParametersBeforeAStepThatFails) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    for (const int fails_at : {1, 2, 3}) {  // micro-batch
      Training run(group, {.micro_batch = 2, .ranks = {.check_replicas_every = 1}});
      const Batch own = share(tiny_batch(12), *group);
      for (int step = 0; step < testing::kFreezingSteps; ++step) {
        testing::freeze_for(step, *run.model);
        int micro_batches = 0;
        const auto failing = [&](const Batch& micro) {
          if (++micro_batches == fails_at && group->rank() == 1) {
            throw std::runtime_error("a bad picture");
          }
          return run.loss_of(micro);
        };
        EXPECT_THROW(run.stepper->step(own, failing), std::runtime_error);
        EXPECT_TRUE(run.step(own).stepped());
      }
    }
  });
}

TEST(StepperOnRanks, SumsTheGradientsOfWhatTheOptimizerHoldsBesidesTheModel) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Batch batch = tiny_batch(7);
    const auto gradient = [&](bool is_alone) {
      auto model = tiny_model();
      auto temperature = torch::ones({2}, torch::requires_grad());
      const auto unused = torch::ones({2}, torch::requires_grad());
      std::optional<DataParallel> ddp;
      if (!is_alone) {
        ddp.emplace(model, group);
      }
      auto parameters = model->parameters();
      parameters.push_back(temperature);
      parameters.push_back(unused);
      torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
      Stepper stepper(model, optimizer, {.ranks = {.data_parallel = ddp ? &*ddp : nullptr}});
      const Batch own = is_alone ? batch : group->rank() == 0 ? batch : batch.slice(0, 0);
      stepper.step(own,
                   [&](const Batch& micro) { return squared_error(model->forward(micro[0]) * temperature, micro[1]); });
      EXPECT_FALSE(unused.grad().defined());
      return temperature.grad();
    };
    EXPECT_TRUE(close_in_norm(gradient(false), gradient(true), 1e-6));
  });
}

// Leaves an infinite gradient on rank 1 alone, as no sum does: after it.
CommHook breaking_on_rank_one(bool& is_on) {
  return [&is_on](GradientBucket bucket, ProcessGroup& group) -> std::function<void()> {
    return [wait = group.start_all_reduce(bucket.gradients), gradients = bucket.gradients,
            breaks = is_on && group.rank() == 1] {
      wait();
      if (breaks) {
        gradients.fill_(INFINITY);
      }
    };
  };
}

TEST(StepperOnRanks, SkipsTogether) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    bool breaks = false;
    Training run(group, {.precision = Precision::Float16}, tiny_model(), testing::sgd,
                 {.hook = breaking_on_rank_one(breaks)});
    EXPECT_TRUE(run.step(share(tiny_batch(4), *group)).stepped());
    breaks = true;
    EXPECT_FALSE(run.step(share(tiny_batch(4), *group)).stepped());
    EXPECT_EQ(run.stepper->scaler().get_scale(), 32768);
  });
}

// Makes matrix products of one type look slow.
class SlowProducts final : public detail::OperatorPolicy {
 public:
  explicit SlowProducts(torch::ScalarType dtype) : dtype_(dtype) {}
  void call(const detail::OperatorCall& call, detail::Stack& stack) override {
    if (call.op.schema().name() == "aten::mm" && stack.back().toTensor().scalar_type() == dtype_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    call.proceed(stack);
  }

 private:
  torch::ScalarType dtype_;
};

void expect_rank_zeros_choice(Precision of_zero, Precision of_one) {
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    const Precision own = group->rank() == 0 ? of_zero : of_one;
    SlowProducts slow(own == Precision::Float32 ? torch::kBFloat16 : torch::kFloat);
    const detail::OperatorScope scope(slow);
    Training run(group, {.precision = Precision::Auto});
    EXPECT_EQ(choose_precision(torch::kCPU), own);
    EXPECT_EQ(run.stepper->precision(), of_zero);
    EXPECT_TRUE(run.step(share(tiny_batch(4), *group)).stepped());
  });
}

TEST(StepperOnRanks, TakeFp32WhereRankZeroMeasuresThatItIsFaster) {
  expect_rank_zeros_choice(Precision::Float32, Precision::BFloat16);
}
TEST(StepperOnRanks, TakeBf16WhereRankZeroMeasuresThatItIsFaster) {
  expect_rank_zeros_choice(Precision::BFloat16, Precision::Float32);
}

TEST(StepperOnRanks, PlansStepsWithinABudgetByPassesThatAreNotSent) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    Training plain(group);
    Training planned(group, {.budget = {.memory = Bytes(1 << 30)}});
    for (int i = 0; i < 2; ++i) {
      const Batch own = share(tiny_batch(16), *group);
      const StepResult expected = plain.step(own);
      EXPECT_EQ(planned.step(own).bytes_sent, expected.bytes_sent);
      EXPECT_TRUE(close_in_norm(gradients_of(*planned.model), gradients_of(*plain.model), 1e-6));
    }
    EXPECT_TRUE(planned.stepper->plan().has_value());
    Training counted(group, {.budget = {.memory = Bytes(1 << 30)}}, tiny_model(), testing::sgd, {.static_graph = true});
    EXPECT_THAT(error_of<ConfigError>([&] { counted.step(share(tiny_batch(16), *group)); }), HasSubstr("plan = false"));
  });
}

TEST(StepperOnRanks, FindsTheFirstParameterThatIsNotTheSameOnAll) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    Training run(group, {.ranks = {.check_replicas_every = 2}});
    if (group->rank() == 2) {
      const torch::NoGradGuard no_grad;
      run.model->parameters()[2][3][4] += 1e-6;
      run.model->parameters()[4].zero_();
    }
    run.step(share(tiny_batch(6), *group));
    EXPECT_THAT(error_of<DistributedError>([&] { run.step(share(tiny_batch(6), *group)); }),
                AllOf(HasSubstr("parameter '3.weight'"), HasSubstr("rank 2 has other values")));
  });
}

// Ranks with fewer would leave the others waiting in the layer.
TEST(StepperOnRanks, RefusesOtherNumbersOfMicroBatchesWhereTheModelSendsInForward) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
    convert_sync_batch_norm(*model, group);
    DataParallel ddp(model, group);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    Stepper stepper(model, optimizer, {.micro_batch = 3, .ranks = {.data_parallel = &ddp}});
    const auto step = [&](int64_t items) {
      return stepper.step(Batch{torch::randn({items, 6})},
                          [&](const Batch& b) { return Loss::sum(model->forward(b[0]).square().sum(), b.size()); });
    };
    const auto before = clones_of(model->parameters());
    for (const int64_t others : {4, 0}) {
      const std::string error = error_of<ConfigError>([&] { step(group->rank() == 0 ? 9 : others); });
      EXPECT_THAT(error, AllOf(HasSubstr(group->rank() == 0 ? "rank 0 has 3" : "rank 1 has"), HasSubstr("same size")));
    }
    EXPECT_TRUE(same_bits(clones_of(model->parameters()), before));
    EXPECT_TRUE(step(group->rank() == 0 ? 9 : 7).stepped()) << "three each";
    model->eval();
    EXPECT_TRUE(step(group->rank() == 0 ? 9 : 1).stepped());
  });
}

TEST(StepperOnRanks, RefusesToPlanWhatSendsOverAnotherGroup) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
    convert_sync_batch_norm(*model, group);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    const StepperOptions options{.budget = {.memory = Bytes(1 << 30)}};
    EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer, options); }),
                HasSubstr("made with the same group"));
  });
}

TEST(StepperOnRanks, RefusesWhatCannotWork) {
  on_ranks(1, [] {
    auto model = tiny_model();
    auto other = tiny_model();
    DataParallel ddp(other, init_process_group(quick()));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer, {.ranks = {.data_parallel = &ddp}}); }),
                HasSubstr("not the model's"));
    EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer, {.ranks = {.check_replicas_every = 3}}); }),
                HasSubstr("check_replicas_every is 3"));
  });
}

}  // namespace
}  // namespace snug::data_parallel_test
