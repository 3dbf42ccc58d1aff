// Rematerialize: for any model and any budget that is feasible, the step has the bits of plain training, and memory
// rises exactly as far as was predicted.

#include <cstdlib>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/adamw.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/state.h"
#include "snug/step_in_backward.h"
#include "src/memory/operator_mode.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::rematerialize_test {
namespace {

using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using testing::expect_same;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::kSearch;
using testing::number_of_models;
using testing::OneThread;
using testing::Outcome;
using testing::random_model;
using testing::RandomModel;
using testing::same_bits;
using testing::smallest_feasible;
using testing::Step;
using torch::Tensor;

TEST(Rematerialize, GivesRandomModelsTheBitsOfPlainTrainingWithinEachOfFiveBudgetsAndPredictsThePeakToTheByte) {
  int64_t replayed = 0;
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const Outcome plain = step.run(std::nullopt);
    step.reset();
    const plan::Profile profile = detail::profile_step(step.forward());
    const int64_t plain_peak = detail::unverified_plan(profile, Bytes::unlimited(), kSearch).plain_peak_bytes;
    EXPECT_EQ(plain_peak, plain.peak_bytes);
    const int64_t smallest = smallest_feasible(profile).count();
    for (int k = 0; k < 5; ++k) {
      const Bytes budget(smallest + (plain_peak - smallest) * k / 4);
      SCOPED_TRACE(budget.count());
      const ActivationPlan plan = detail::unverified_plan(profile, budget, kSearch);
      const Outcome planned = step.run(plan);
      expect_same(planned, plain);
      EXPECT_EQ(planned.peak_bytes, plan.predicted_peak_bytes);
      EXPECT_LE(planned.peak_bytes, budget.count());
      replayed += planned.replayed;
    }
  }
  EXPECT_GT(replayed, 1000);
}

TEST(Rematerialize, PlanningLeavesGradientsBuffersAndGeneratorsAsTheyWere) {
  const RandomModel model = random_model(1);  // with BatchNorm
  Step step(model);
  step.run(std::nullopt);
  const std::vector<Tensor> gradients = gradients_of(model.leaves()), buffers = clones_of(model.module->buffers());
  const RngState generators = RngState::capture();
  plan_activations(step.forward(), Bytes::unlimited());
  EXPECT_TRUE(same_bits(gradients_of(model.leaves()), gradients));
  EXPECT_TRUE(same_bits(model.module->buffers(), buffers));
  EXPECT_TRUE(generators == RngState::capture());
}

// Two layers, of which each result is squared, so that everything is saved for backward.
struct Chain {
  torch::nn::Linear first{64, 64}, second{64, 64};
  Tensor input = torch::randn({128, 64});

  Tensor loss(int extra = 0) {
    Tensor h = first->forward(input).sigmoid();
    for (int i = 0; i < extra; ++i) {
      h = h.exp().log1p();
    }
    return second->forward(h).sigmoid().pow(2).sum();
  }
  std::vector<Tensor> gradients() { return {first->weight.grad().clone(), second->weight.grad().clone()}; }
  void zero() {
    first->zero_grad();
    second->zero_grad();
  }
};

// Under the most frugal plan for `profiled`, `trained` has the gradients that it has without one. Returns what the
// scope noticed.
std::string expect_plain_gradients(Chain& chain, const std::function<Tensor()>& profiled,
                                   const std::function<Tensor()>& trained) {
  trained().backward();
  const std::vector<Tensor> plain = chain.gradients();
  chain.zero();
  const plan::Profile profile = detail::profile_step(profiled);
  std::optional<Rematerialize> scope(std::in_place,
                                     detail::unverified_plan(profile, smallest_feasible(profile), kSearch));
  const Tensor loss = trained();
  std::string deviation = scope->deviation();
  scope.reset();
  loss.backward();
  EXPECT_TRUE(same_bits(chain.gradients(), plain));
  return deviation;
}

TEST(Rematerialize, KeepsEverythingFromTheFirstOperatorThatIsAnotherThanInTheProfile) {
  Chain chain;
  const std::string deviation =
      expect_plain_gradients(chain, [&] { return chain.loss(); }, [&] { return chain.loss(2); });
  EXPECT_THAT(deviation, AllOf(HasSubstr("aten::exp"), HasSubstr("aten::")));
}

TEST(Rematerialize, NoticesTheSameOperatorsOnOtherOperands) {
  Chain chain;
  bool is_swapped = false;
  const auto loss_of = [&] {
    const Tensor a = chain.first->forward(chain.input).sigmoid(), b = chain.second->forward(chain.input).sigmoid();
    const Tensor& c = is_swapped ? b : a;
    return (a.exp() * b + c.sin().exp()).pow(2).sum();
  };
  const std::string deviation = expect_plain_gradients(
      chain,
      [&] {
        is_swapped = false;
        return loss_of();
      },
      [&] {
        is_swapped = true;
        return loss_of();
      });
  EXPECT_THAT(deviation, HasSubstr("on other operands"));
}

TEST(Rematerialize, GivesGradientsOfGradients) {
  Chain chain;
  const plan::Profile profile = detail::profile_step([&] { return chain.loss(); });
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  const auto penalty = [&](bool under_plan) {
    chain.zero();
    Tensor loss;
    {
      std::optional<Rematerialize> scope;
      if (under_plan) {
        scope.emplace(plan);
      }
      loss = chain.loss();
    }
    const auto first =
        torch::autograd::grad({loss}, {chain.first->weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    first[0].pow(2).sum().backward();
    return chain.gradients();
  };
  EXPECT_TRUE(same_bits(penalty(true), penalty(false)));
}

TEST(Rematerialize, HasCheckpointedRegionsInside) {
  Chain chain;
  const auto loss_of = [&] {
    return checkpoint([&](Tensor x) { return chain.first->forward(x).sigmoid().exp(); }, chain.input).pow(2).sum() +
           chain.loss();
  };
  expect_plain_gradients(chain, loss_of, loss_of);
}

TEST(Rematerialize, RefusesToRebuildFromWhatWasWrittenSinceTheForwardPass) {
  Chain chain;
  const plan::Profile profile = detail::profile_step([&] { return chain.loss(); });
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  Tensor loss;
  {
    const Rematerialize scope(plan);
    loss = chain.loss();
  }
  {
    torch::NoGradGuard no_grad;
    chain.first->bias.add_(1);  // autograd does not save it, so it would not notice
  }
  EXPECT_THAT(error_of<Error>([&] { loss.backward(); }), HasSubstr("written in place after the forward pass"));
}

TEST(Rematerialize, TakesSeveralLossesWithABackwardPassForEach) {
  Chain chain;
  const auto losses = [&] { return std::pair(chain.loss(), chain.loss().exp2()); };
  const plan::Profile profile = detail::profile_step([&] {
    const auto [a, b] = losses();
    return a + b;
  });
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  const auto train = [&](bool under_plan) {
    chain.zero();
    std::optional<Rematerialize> scope;
    if (under_plan) {
      scope.emplace(plan);
    }
    const auto [a, b] = losses();
    scope.reset();
    a.backward();
    b.backward();
    return chain.gradients();
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
}

TEST(Rematerialize, GoesOnAfterAnOperatorThatThrew) {
  Chain chain;
  const auto loss_of = [&] {
    Tensor h = chain.first->forward(chain.input).sigmoid();
    Tensor scaled = h * 2;
    EXPECT_THROW(scaled.add_(torch::ones({3})), c10::Error);
    return chain.second->forward(scaled.exp()).pow(2).sum();
  };
  expect_plain_gradients(chain, loss_of, loss_of);
}

TEST(Rematerialize, KeepsWhatComesAfterABackwardPassInsideAndSaysSo) {
  Chain chain;
  const auto penalty = [&] {
    const Tensor loss = chain.loss();
    const auto first =
        torch::autograd::grad({loss}, {chain.first->weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return loss + first[0].pow(2).sum();
  };
  EXPECT_NE(expect_plain_gradients(chain, [&] { return chain.loss(); }, penalty), "");
}

TEST(Rematerialize, LeavesNothingBehindWhenTheGraphIsDroppedOrTheForwardThrows) {
  Chain chain;
  const plan::Profile profile = detail::profile_step([&] { return chain.loss(); });
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  const int64_t before = live_bytes(torch::kCPU).count();
  {
    const Rematerialize scope(plan);
    chain.loss();
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
  try {
    const Rematerialize scope(plan);
    const Tensor loss = chain.loss();
    throw std::runtime_error("in the forward pass");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
}

// The graph of a result that the program keeps is the beginning of the forward pass, and has the plan in hand.
TEST(Rematerialize, ThatThrowsKeepsNothingForAResultThatIsKept) {
  Chain chain;
  Tensor kept;
  const auto forward = [&] {
    kept = chain.first->forward(chain.input).sigmoid();
    Tensor h = kept;
    for (int layer = 0; layer < 6; ++layer) {
      h = h.sin().exp();
    }
    return h.sum();
  };
  const plan::Profile profile = detail::profile_step(forward);
  kept = Tensor();
  const Bytes halfway((smallest_feasible(profile).count() +
                       detail::unverified_plan(profile, Bytes::unlimited(), kSearch).plain_peak_bytes) /
                      2);
  const ActivationPlan plan = detail::unverified_plan(profile, halfway, kSearch);
  const int64_t before = live_bytes(torch::kCPU).count();
  try {
    const Rematerialize scope(plan);
    forward();
    throw std::runtime_error("in the forward pass");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before + static_cast<int64_t>(kept.nbytes()));
}

TEST(Rematerialize, ThatRunsOutOfMemoryInBackwardLeavesNothingBehind) {
  Chain chain;
  const plan::Profile profile = detail::profile_step([&] { return chain.loss(); });
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  const int64_t before = live_bytes(torch::kCPU).count();
  {
    std::optional<Rematerialize> scope(plan);
    const Tensor loss = chain.loss();
    scope.reset();
    const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + 1000));
    EXPECT_THROW(loss.backward(), c10::OutOfMemoryError);
  }
  chain.zero();
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
}

TEST(Rematerialize, NeverRebuildsWhatCameFromElsewhere) {
  Chain chain;
  const auto loss_of = [&] {
    const Tensor received = torch::empty({128, 64});
    std::fill_n(received.data_ptr<float>(), received.numel(), 0.5F);
    detail::report_unseen_write(received);  // as ProcessGroup does
    return (chain.first->forward(chain.input).sigmoid() * received.exp()).pow(2).sum() + chain.loss();
  };
  expect_plain_gradients(chain, loss_of, loss_of);
}

TEST(PlanActivations, RefusesHooksThatProfilingWouldRun) {
  Chain chain;
  AdamW optimizer(chain.first->parameters());
  const StepInBackward scope(optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] { detail::profile_step([&] { return chain.loss(); }); }),
              HasSubstr("StepInBackward"));
}

// What operators cannot see: values that come from elsewhere through a pointer.
TEST(PlanActivations, KeepsWhatHasOtherBitsWhenItIsMadeAgain) {
  Chain chain;
  const auto loss_of = [&] {
    Tensor mask = torch::empty({128, 64});
    std::fill_n(mask.data_ptr<float>(), mask.numel(), 0.5F);
    return (chain.first->forward(chain.input).sigmoid() * mask).pow(2).sum() + chain.loss();
  };
  loss_of().backward();
  const std::vector<Tensor> plain = chain.gradients();
  chain.zero();
  const int64_t smallest = smallest_feasible(detail::profile_step(loss_of)).count();
  const ActivationPlan plan = plan_activations(loss_of, Bytes(smallest + 4 * 128 * 64 * 4));
  Tensor loss;
  {
    const Rematerialize scope(plan);
    loss = loss_of();
  }
  loss.backward();
  EXPECT_TRUE(same_bits(chain.gradients(), plain));
}

// A step that takes more memory, all the time, than it did while it was profiled, and not by an operator.
struct GrowingStep {
  Chain chain;
  c10::DataPtr more;
  std::function<size_t(int)> bytes;  // in its first, second, ... call
  int calls = 0;

  explicit GrowingStep(std::function<size_t(int)> of_call) : bytes(std::move(of_call)) {}
  Tensor loss() {
    more = {};
    more = c10::GetAllocator(c10::kCPU)->allocate(bytes(++calls));
    return chain.loss(/*extra=*/8);
  }
};

TEST(PlanActivations, PlansForMemoryThatRisesHigherThanPredicted) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  GrowingStep step([](int call) { return call <= 2 ? 0 : 64 << 10; });
  const plan::Profile profile = detail::profile_step([&] { return step.loss(); });
  const int64_t plain = detail::unverified_plan(profile, Bytes::unlimited(), kSearch).plain_peak_bytes;
  for (const int64_t budget : {(plain + smallest_feasible(profile).count()) / 2, 2 * plain}) {
    const ActivationPlan plan = detail::plan_activations(profile, [&] { return step.loss(); }, Bytes(budget));
    step.chain.zero();
    step.more = {};
    const MemoryMeter meter;
    Tensor loss;
    {
      const Rematerialize scope(plan);
      loss = step.loss();
      EXPECT_EQ(scope.deviation(), "");
    }
    loss.backward();
    EXPECT_LE(meter.report().peak_bytes, budget);
    EXPECT_LE(meter.report().peak_bytes, plan.predicted_peak_bytes);
    EXPECT_EQ(ActivationPlan::from_json(plan.to_json()).predicted_peak_bytes, plan.predicted_peak_bytes);
  }
}

TEST(PlanActivations, IsAnErrorWherePlanAfterPlanRisesHigherThanPredicted) {
  GrowingStep step([](int call) { return call <= 2 ? 0 : size_t{1} << (13 + call); });
  const plan::Profile profile = detail::profile_step([&] { return step.loss(); });
  const Bytes budget(smallest_feasible(profile).count() + (64 << 10));
  EXPECT_THROW(detail::plan_activations(profile, [&] { return step.loss(); }, budget), Error);
}

TEST(PlanActivations, TriesAPlanThatASearchHasFoundBeforeItSearches) {
  Chain chain;
  const auto loss = [&] { return chain.loss(); };
  const plan::Profile profile = detail::profile_step(loss);
  const plan::Solution frugal =
      detail::solution_of(detail::unverified_plan(profile, smallest_feasible(profile), kSearch));
  const ActivationPlan plan = detail::plan_activations(profile, loss, Bytes::unlimited(), frugal);
  EXPECT_LT(frugal.peak_bytes, frugal.plain_peak_bytes);
  EXPECT_EQ(detail::solution_of(plan), frugal);
}

TEST(PlanActivations, WritesAPlanThatReadsBackAndExplainsItself) {
  Chain chain;
  const plan::Profile profile = detail::profile_step([&] { return chain.loss(); });
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  const ActivationPlan read = ActivationPlan::from_json(plan.to_json());
  EXPECT_EQ(detail::solution_of(read), detail::solution_of(plan));
  EXPECT_EQ(detail::profile_of(read), detail::profile_of(plan));
  EXPECT_EQ(read.predicted_peak_bytes, plan.predicted_peak_bytes);
  EXPECT_THAT(plan.explain(), HasSubstr("aten::"));
  EXPECT_THAT(error_of<ConfigError>([] { ActivationPlan::from_json("{}"); }), HasSubstr("no plan"));
}

// The first run is cold.
TEST(ProfileStep, RunsTwice) {
  Chain chain;
  int runs = 0;
  detail::profile_step([&] {
    ++runs;
    return chain.loss();
  });
  EXPECT_EQ(runs, 2);
}

TEST(PlanActivations, SaysWhatWouldDoAndRefusesWhatHasNoLoss) {
  Chain chain;
  EXPECT_THAT(error_of<BudgetExceeded>([&] { plan_activations([&] { return chain.loss(); }, Bytes(1000)); }),
              AllOf(HasSubstr("1000 B"), HasSubstr("bytes"), HasSubstr("no plan takes less")));
  EXPECT_THAT(error_of<ConfigError>([&] { plan_activations([&] { return chain.input; }, Bytes(1 << 30)); }),
              HasSubstr("8192 elements"));
}

}  // namespace
}  // namespace snug::rematerialize_test
