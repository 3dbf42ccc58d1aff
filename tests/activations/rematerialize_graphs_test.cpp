// Rematerialize: graphs that are gone through twice or on another thread, operators on lists and with generators of their own; profiles and plans
// made where plain training does not fit; and what goes to disk.

#include <algorithm>
#include <optional>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/activations/rematerialize.h"
#include "snug/core/error.h"
#include "snug/memory/detail/operator_mode.h"
#include "snug/memory/limit.h"
#include "snug/memory/meter.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug {
namespace {

using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::kSearch;
using testing::number_of_models;
using testing::OneThread;
using testing::random_model;
using testing::RandomModel;
using testing::same_bits;
using testing::smallest_feasible;
using testing::Step;
using testing::TemporaryFolder;
using torch::Tensor;

// The gradients of one forward pass, under a plan or not, with `backward` called on its loss.
std::vector<Tensor> gradients(const RandomModel& model, Step& step, const std::optional<ActivationPlan>& plan,
                              const std::function<void(Tensor)>& backward) {
  step.reset();
  std::optional<Rematerialize> scope;
  if (plan) {
    scope.emplace(*plan);
  }
  const Tensor loss = model.loss(model.input);
  if (scope) {
    EXPECT_EQ(scope->deviation(), "");
  }
  scope.reset();
  backward(loss);
  return gradients_of(model.leaves());
}

constexpr SolverOptions kQuickSearch{.work = 100'000};

TEST(Rematerialize, RebuildsForEachOfSeveralBackwardPassesThroughTheSameGraph) {
  const auto twice = [](const Tensor& loss) {
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const StepSimulator simulator(profile_step(step.forward()));
    const Bytes smallest(PlanSolver(simulator, kQuickSearch).smallest().peak_bytes);
    const ActivationPlan plan(simulator.profile(), smallest, kQuickSearch);
    EXPECT_TRUE(same_bits(gradients(model, step, plan, twice), gradients(model, step, std::nullopt, twice)));
  }
}

TEST(Rematerialize, GoesBackwardOnAnotherThread) {
  const RandomModel model = random_model(3);
  Step step(model);
  const StepProfile profile = profile_step(step.forward());
  const ActivationPlan plan(profile, smallest_feasible(profile), kSearch);
  const auto elsewhere = [](const Tensor& loss) { std::thread([&] { loss.backward(); }).join(); };
  EXPECT_TRUE(same_bits(gradients(model, step, plan, elsewhere), gradients(model, step, std::nullopt, elsewhere)));
}

// The gradient of `weight` after a step of `forward`, plainly and under the most frugal plan; that operators ran again, and
// the peak that was predicted.
void expect_plain_gradient(Tensor weight, const std::function<Tensor()>& forward) {
  const auto gradient = [&](const std::optional<ActivationPlan>& plan) {
    weight.mutable_grad() = Tensor();
    const MemoryMeter meter;
    std::optional<Rematerialize> scope;
    if (plan) {
      scope.emplace(*plan);
    }
    const Tensor loss = forward();
    const auto replayed = scope ? scope->replayed_operators() : nullptr;
    scope.reset();
    loss.backward();
    if (plan) {
      EXPECT_GT(*replayed, 0);
      EXPECT_EQ(meter.report().peak_bytes, plan->predicted_peak_bytes);
    }
    return weight.grad().clone();
  };
  const Tensor plain = gradient(std::nullopt);
  weight.mutable_grad() = Tensor();
  const StepProfile profile = profile_step(forward);
  EXPECT_TRUE(torch::equal(gradient(ActivationPlan(profile, smallest_feasible(profile), kSearch)), plain));
}

TEST(Rematerialize, RebuildsWhatOperatorsOnListsMade) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  expect_plain_gradient(weight, [&] {
    std::vector<Tensor> both = {weight, weight * 2};
    for (int layer = 0; layer < 4; ++layer) {
      const std::vector<Tensor> waves = torch::_foreach_sin(both);
      both = torch::_foreach_mul(waves, torch::_foreach_exp(waves));
    }
    return (both[0] * both[1]).sum();
  });
}

TEST(Rematerialize, DrawsAgainFromAGeneratorOfTheProgram) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  torch::Generator generator = torch::make_generator<at::CPUGeneratorImpl>();
  expect_plain_gradient(weight, [&] {
    generator.set_current_seed(7);
    const Tensor kept = torch::empty({64, 64}).bernoulli_(0.5, generator);
    const Tensor noise = torch::rand({64, 64}, generator);
    return ((weight.sigmoid() * kept).exp() * noise).pow(2).sum();
  });
}

TEST(Rematerialize, KeepsWhatAnOperatorHasResized) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  expect_plain_gradient(weight, [&] {
    Tensor scales = torch::empty({0});
    torch::exp_out(scales, weight.detach());
    return ((weight.sigmoid().exp() * scales).sin() * scales).pow(2).sum();
  });
}

StepProfile without_times(StepProfile profile) {
  for (ProfiledOperator& op : profile.operators) {
    op.seconds = 0;
  }
  for (BackwardStep& step : profile.backward) {
    step.seconds = 0;
  }
  return profile;
}

TEST(ProfileStep, TakesTheSameProfileWherePlainTrainingDoesNotFit) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const StepProfile plain = without_times(profile_step(step.forward()));
    step.reset();
    const StepProfile frugal = without_times(profile_step(step.forward(), {.memory = Bytes(1)}));
    EXPECT_EQ(frugal.storages, plain.storages);
    EXPECT_EQ(frugal.operators, plain.operators);
    EXPECT_EQ(frugal.backward, plain.backward);
    EXPECT_EQ(frugal.events, plain.events);
  }
}

// Layers of equal width; every result is saved for backward.
struct DeepChain {
  explicit DeepChain(int64_t layers) {
    torch::manual_seed(1);
    for (int64_t i = 0; i < layers; ++i) {
      blocks->push_back(torch::nn::Linear(32, 32));
      blocks->push_back(torch::nn::Sigmoid());
    }
  }
  Tensor loss() { return blocks->forward(input).pow(2).mean(); }
  void update() {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : blocks->parameters()) {
      parameter.sub_(parameter.grad());
      parameter.mutable_grad() = Tensor();
    }
  }

  torch::nn::Sequential blocks;
  Tensor input = torch::randn({2048, 32});
};

TEST(PlanActivations, TrainsUnderALimitThatPlainTrainingExceedsFourTimes) {
  constexpr int kSteps = 3;
  DeepChain plain(32), planned(32);
  const MemoryMeter meter;
  for (int i = 0; i < kSteps; ++i) {
    plain.loss().backward();
    plain.update();
  }
  const int64_t budget = meter.report().peak_bytes / 4;
  constexpr int64_t kForGenerators = 8192;  // their states, which planning puts back
  const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + budget + kForGenerators));
  const auto step = [&] { return planned.loss(); };
  EXPECT_THROW(step().backward(), c10::OutOfMemoryError);
  planned.blocks->zero_grad();
  const ActivationPlan plan = plan_activations(step, Bytes(budget));
  EXPECT_LE(plan.predicted_peak_bytes, budget);
  for (int i = 0; i < kSteps; ++i) {
    Tensor loss;
    {
      const Rematerialize scope(plan);
      loss = step();
    }
    loss.backward();
    planned.update();
  }
  EXPECT_TRUE(same_bits(planned.blocks->parameters(), plain.blocks->parameters()));
}

// --- what goes to disk

OffloadLink link_to(const std::filesystem::path& directory) {
  return {.directory = directory.string(), .out_bytes_per_second = 1e9, .back_bytes_per_second = 2e9, .seconds = 1e-5};
}

// Any plan, as it would be read from a file; none if it cannot be executed.
std::optional<ActivationPlan> plan_of(const StepSimulator& simulator, const HoldFrom& hold_from) {
  const Simulation run = simulator.run(hold_from);
  if (run.impossible >= 0) {
    return std::nullopt;
  }
  const RematPlan plan{.hold_from = hold_from, .peak_bytes = run.peak_bytes, .seconds = run.seconds};
  return ActivationPlan::from_json(R"({"plan":)" + plan.to_json() + R"(,"profile":)" + simulator.profile().to_json() +
                                   "}");
}

HoldFrom all_offloaded(const StepProfile& profile) {
  HoldFrom plan(profile.storages.size(), kOffload);
  for (size_t s = 0; s < plan.size(); ++s) {
    plan[s] = profile.storages[s].bytes > 0 ? kOffload : kKeep;
  }
  return plan;
}

TEST(Rematerialize, OffloadsAnyStorageOfRandomModelsToTheBitAndPredictsThePeakToTheByte) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  const TemporaryFolder folder;
  int mixed = 0;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const testing::Outcome plain = step.run(std::nullopt);
    step.reset();
    const StepSimulator simulator(profile_step(step.forward(), {.link = link_to(folder.path())}));
    std::mt19937 random(static_cast<uint32_t>(seed));
    HoldFrom choices = all_offloaded(simulator.profile());
    for (int trial = 0; trial < 3; ++trial) {
      if (const auto plan = plan_of(simulator, choices)) {
        const testing::Outcome planned = step.run(plan);
        testing::expect_same(planned, plain);
        EXPECT_EQ(planned.peak_bytes, simulator.run(choices).peak_bytes) << trial;
        EXPECT_GT(plan->offloaded().bytes_out, 0);
        mixed += planned.replayed > 0 ? 1 : 0;
      }
      for (size_t s = 0; s < choices.size(); ++s) {
        const bool may_leave = simulator.profile().storages[s].bytes > 0;
        const uint32_t choice = static_cast<uint32_t>(random()) % 8;
        choices[s] = choice < 5 && may_leave ? kOffload : choice == 6 ? kHold : choice == 7 ? kNever : kKeep;
      }
    }
  }
  EXPECT_GT(mixed, 20);
}

TEST(Rematerialize, OffloadsForEachOfSeveralBackwardPassesThroughTheSameGraph) {
  const TemporaryFolder folder;
  const auto twice = [](const Tensor& loss) {
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const StepSimulator simulator(profile_step(step.forward(), {.link = link_to(folder.path())}));
    const auto plan = plan_of(simulator, all_offloaded(simulator.profile()));
    ASSERT_TRUE(plan.has_value());
    EXPECT_TRUE(same_bits(gradients(model, step, plan, twice), gradients(model, step, std::nullopt, twice)));
  }
}

TEST(Rematerialize, StillHasWhatItOffloadsAndTheProgramDropsBetweenTwoBackwardPasses) {
  const TemporaryFolder folder;
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  Tensor received;
  const auto step = [&] {
    received = torch::empty({64, 64});
    std::fill_n(received.data_ptr<float>(), received.numel(), 0.5F);
    detail::report_unseen_write(received);  // it cannot be made again, and autograd does not save it
    return (weight.sigmoid() * received.exp()).sum();
  };
  const auto gradient = [&](const std::optional<ActivationPlan>& plan) {
    weight.mutable_grad() = Tensor();
    std::optional<Rematerialize> scope;
    if (plan) {
      scope.emplace(*plan);
    }
    const Tensor loss = step();
    scope.reset();
    loss.backward({}, /*retain_graph=*/true);
    received = Tensor();
    loss.backward();
    return weight.grad().clone();
  };
  const StepSimulator simulator(profile_step(step, {.link = link_to(folder.path())}));
  HoldFrom choices = keep_all(simulator.profile());
  for (size_t s = 0; s < choices.size(); ++s) {
    const std::string& name = simulator.profile().storages[s].name;
    choices[s] = name.starts_with("aten::empty") ? kOffload : name == "aten::exp" ? kNever : choices[s];
  }
  const auto plan = plan_of(simulator, choices);
  ASSERT_TRUE(plan.has_value());
  EXPECT_TRUE(torch::equal(gradient(plan), gradient(std::nullopt)));
}

// A mask that comes from elsewhere: no operator can make it again.
struct TimesMask : torch::autograd::Function<TimesMask> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const Tensor mask = torch::empty_like(x);
    float* const values = mask.data_ptr<float>();
    for (int64_t i = 0; i < mask.numel(); ++i) {
      values[i] = i % 3 == 0 ? 0.5F : 1.25F;
    }
    context->save_for_backward({mask});
    return x * mask;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0]};
  }
};

TEST(PlanActivations, TrainsByOffloadingWhatNeitherFitsNorCanBeComputedAgain) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  constexpr int64_t kLayers = 12, kRows = 2048, kWidth = 32, kActivation = kRows * kWidth * 4;
  const Tensor input = torch::randn({kRows, kWidth});
  const Tensor weight = torch::rand({kWidth}, torch::requires_grad());
  const auto step = [&] {
    Tensor h = input * weight;
    for (int64_t i = 0; i < kLayers; ++i) {
      h = TimesMask::apply(h);
    }
    return h.sum();
  };
  step().backward();
  const Tensor plain = weight.grad();
  weight.mutable_grad() = Tensor();
  const TemporaryFolder folder;
  const Bytes budget(5 * kActivation);
  EXPECT_THROW(plan_activations(step, budget), BudgetExceeded);
  constexpr int64_t kForGenerators = 16384;  // their states, which planning puts back
  const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + budget.count() + kForGenerators));
  const ActivationPlan plan = plan_activations(step, budget, link_to(folder.path()));
  EXPECT_LE(plan.predicted_peak_bytes, budget.count());
  EXPECT_THAT(plan.explain(), HasSubstr("goes to disk:"));
  const MemoryMeter meter;
  Tensor loss;
  {
    const Rematerialize scope(plan);
    loss = step();
  }
  loss.backward();
  EXPECT_EQ(meter.report().peak_bytes, plan.predicted_peak_bytes);
  EXPECT_TRUE(torch::equal(weight.grad(), plain));
  EXPECT_GE(plan.offloaded().bytes_back, (kLayers - 5) * kActivation);
}

TEST(Rematerialize, NoticesThatWhatItWouldOffloadWasWrittenInPlace) {
  const TemporaryFolder folder;
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  Tensor between;
  const auto step = [&] {
    between = weight.sigmoid();
    return between.exp().sum();
  };
  const StepSimulator simulator(profile_step(step, {.link = link_to(folder.path())}));
  const auto plan = plan_of(simulator, all_offloaded(simulator.profile()));
  ASSERT_TRUE(plan.has_value());
  Tensor loss;
  {
    const Rematerialize scope(*plan);
    loss = step();
  }
  between.detach().add_(1);
  EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(Rematerialize, IsExplainedButNotRunWithoutTheDirectoryToOffloadTo) {
  const TemporaryFolder folder;
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  const StepSimulator simulator(
      profile_step([&] { return weight.sigmoid().exp().sum(); }, {.link = link_to(folder / "nowhere")}));
  const auto plan = plan_of(simulator, all_offloaded(simulator.profile()));
  ASSERT_TRUE(plan.has_value());
  EXPECT_THAT(plan->explain(), HasSubstr("goes to disk:"));
  EXPECT_THAT(error_of<Error>([&] { const Rematerialize scope(*plan); }), HasSubstr("nowhere"));
}

TEST(MeasureOffloadLink, FindsSpeedsWithoutTakingTensorMemory) {
  const TemporaryFolder folder;
  const MemoryMeter meter;
  const OffloadLink link = measure_offload_link(folder.path());
  EXPECT_TRUE(link.is_open());
  EXPECT_EQ(link.directory, folder.path().string());
  EXPECT_EQ(meter.report().peak_bytes, 0);
  EXPECT_THAT(error_of<Error>([&] { measure_offload_link(folder / "nowhere"); }), HasSubstr("nowhere"));
}

}  // namespace
}  // namespace snug
