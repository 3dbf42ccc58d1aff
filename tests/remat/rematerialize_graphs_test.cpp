// Rematerialize: graphs that are gone through twice or on another thread, operators on lists and with generators of
// their own; profiles and plans made where plain training does not fit.

#include <algorithm>
#include <numeric>
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/memory.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::rematerialize_graphs_test {
namespace {

using plan::keep_all;
using plan::Simulator;
using plan::Solver;
using plan::SolverOptions;
using plan::Stay;
using plan::Stays;
using testing::gradients;
using testing::kSearch;
using testing::number_of_models;
using testing::OneThread;
using testing::plan_of;
using testing::random_model;
using testing::RandomModel;
using testing::same_bits;
using testing::smallest_feasible;
using testing::Step;
using torch::Tensor;

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
    const Simulator simulator(detail::profile_step(step.forward()));
    const Bytes smallest(Solver(simulator, kQuickSearch).smallest().peak_bytes);
    const ActivationPlan plan = detail::unverified_plan(simulator.profile(), smallest, kQuickSearch);
    EXPECT_TRUE(same_bits(gradients(model, step, plan, twice), gradients(model, step, std::nullopt, twice)));
  }
}

TEST(Rematerialize, GoesBackwardOnAnotherThread) {
  const RandomModel model = random_model(3);
  Step step(model);
  const plan::Profile profile = detail::profile_step(step.forward());
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  const auto elsewhere = [](const Tensor& loss) { std::thread([&] { loss.backward(); }).join(); };
  EXPECT_TRUE(same_bits(gradients(model, step, plan, elsewhere), gradients(model, step, std::nullopt, elsewhere)));
}

// The gradient of `weight` after a step of `forward`, plainly and under the most frugal plan; that operators ran again,
// and the peak that was predicted.
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
  const plan::Profile profile = detail::profile_step(forward);
  EXPECT_TRUE(torch::equal(gradient(detail::unverified_plan(profile, smallest_feasible(profile), kSearch)), plain));
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

// A network that is to solve u'' + u = 0: its loss is made of derivatives of its own.
TEST(Rematerialize, PlansForwardPassesThatGoBackwardThemselves) {
  const Tensor in = torch::randn({1, 64}, torch::requires_grad()), weight = torch::randn({64, 64}) / 8;
  weight.requires_grad_(true);
  const Tensor places = torch::linspace(0, 1, 512).unsqueeze(1).requires_grad_(true);
  const auto slope = [&](const Tensor& u) {
    return torch::autograd::grad({u.sum()}, {places}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  };
  expect_plain_gradient(weight, [&] {
    Tensor h = torch::matmul(places, in);
    for (int layer = 0; layer < 3; ++layer) {
      h = torch::matmul(torch::tanh(h), weight);
    }
    const Tensor u = h.sum(1, true);
    return (slope(slope(u)) + u).square().mean();
  });
}

// Autograd adds gradients up in place where nobody else holds them; a plan that keeps the sum must not be in the way.
TEST(Rematerialize, MayKeepWhatABackwardPassInsideAddsUp) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad()), input = torch::randn({64, 64});
  const auto forward = [&] {
    const Tensor place = input.detach().requires_grad_(true);
    const Tensor energy = place.sin().sum() + place.cos().sum();
    const Tensor force = torch::autograd::grad({energy}, {place})[0];
    return torch::matmul(force, weight).tanh().sigmoid().square().sum();
  };
  const Simulator simulator(detail::profile_step(forward));
  Stays choices = keep_all(simulator.profile());
  for (size_t s = 0; s < choices.size(); ++s) {
    if (simulator.profile().storages[s].name == "aten::tanh") {
      choices[s] = Stay::once_rebuilt();
    }
  }
  ASSERT_EQ(simulator.run(choices).replays.size(), 1U);
  const ActivationPlan planned = *plan_of(simulator, choices);
  const MemoryMeter meter;
  Tensor loss;
  {
    const Rematerialize scope(planned);
    loss = forward();
    EXPECT_EQ(scope.deviation(), "");
  }
  loss.backward();
  EXPECT_EQ(meter.report().peak_bytes, planned.predicted_peak_bytes);
  const Tensor gradient = weight.grad().clone();
  weight.mutable_grad() = Tensor();
  forward().backward();
  EXPECT_TRUE(torch::equal(gradient, weight.grad()));
}

// Nor in the order in which LibTorch lets go of all tangents at once: by their addresses.
plan::Profile without_times(plan::Profile profile) {
  for (plan::Operator& op : profile.operators) {
    op.seconds = 0;
  }
  for (plan::BackwardStep& step : profile.backward) {
    step.seconds = 0;
  }
  const auto is_drop = [](const plan::Event& event) { return event.kind == plan::EventKind::Drop; };
  for (auto first = profile.events.begin(); first != profile.events.end();) {
    const auto last = std::find_if_not(first, profile.events.end(), is_drop);
    std::sort(first, last, [](const plan::Event& a, const plan::Event& b) { return a.index < b.index; });
    first = std::find_if(last, profile.events.end(), is_drop);
  }
  return profile;
}

TEST(ProfileStep, TakesTheSameProfileWherePlainTrainingDoesNotFit) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const plan::Profile plain = without_times(detail::profile_step(step.forward()));
    step.reset();
    const plan::Profile frugal = without_times(detail::profile_step(step.forward(), {.memory = Bytes(1)}));
    EXPECT_EQ(frugal.storages, plain.storages);
    EXPECT_EQ(frugal.operators, plain.operators);
    EXPECT_EQ(frugal.backward, plain.backward);
    EXPECT_EQ(frugal.events, plain.events);
  }
}

TEST(ProfileStep, TellsWhichBackwardStepsLeaveGradientsOfParameters) {
  torch::manual_seed(1);
  torch::nn::Linear first(8, 32), second(32, 4);
  const Tensor x = torch::randn({64, 8});
  const auto forward = [&] { return second->forward(torch::gelu(first->forward(x))).square().mean(); };
  const auto gradient_bytes = [](const plan::Profile& profile) {
    std::vector<int64_t> left;
    for (const plan::BackwardStep& step : profile.backward) {
      if (step.gradient_bytes > 0) {
        left.push_back(step.gradient_bytes);
      }
    }
    return left;
  };
  const plan::Profile profile = detail::profile_step(forward);
  const std::vector<int64_t> left = gradient_bytes(profile);
  const auto bytes_of = [](const torch::nn::Linear& layer) {
    return static_cast<int64_t>(layer->weight.nbytes() + layer->bias.nbytes());
  };
  EXPECT_EQ(std::accumulate(left.begin(), left.end(), int64_t{0}), bytes_of(first) + bytes_of(second));
  EXPECT_EQ(plan::Profile::from_json(profile.to_json()), profile);
  forward().backward();
  EXPECT_THAT(gradient_bytes(detail::profile_step(forward)), ::testing::IsEmpty()) << "they are alive already";
}

// What the inner pass needs was dropped, and cannot be made again from a buffer that has other values now.
TEST(ProfileStep, FitsNowhereIfABackwardPassInsideNeedsWhatWasOverwritten) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad()), input = torch::randn({64, 64});
  Tensor mean = torch::zeros({64});
  const auto forward = [&] {
    const Tensor place = input.detach().requires_grad_(true);
    const Tensor energy = (torch::matmul(place, weight) - mean).tanh().square().sum();
    mean.mul_(0.9);
    const Tensor force = torch::autograd::grad({energy}, {place}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return force.square().sum();
  };
  EXPECT_GT(detail::profile_step(forward).operators.size(), 5);
  EXPECT_THROW(detail::profile_step(forward, {.memory = Bytes(1)}), c10::OutOfMemoryError);
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

}  // namespace
}  // namespace snug::rematerialize_graphs_test
