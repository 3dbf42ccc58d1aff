// Rematerialize: backward passes that hooks make inside the backward pass, and graphs that outlive it. The bits are
// those of plain training, and the peak is the predicted one to the byte.

#include <functional>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/state.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/tensors.h"

namespace snug::rematerialize_hooks_test {
namespace {

using testing::kSearch;
using testing::OneThread;
using testing::same_bits;
using testing::smallest_feasible;
using torch::Tensor;
using Forward = std::function<Tensor()>;

struct Passed {
  std::vector<Tensor> gradients;
  int64_t peak_bytes = 0;
};

Tensor kept_by_program;

// A prediction is for steps that begin without gradients, and without what the program has kept.
void reset(const std::vector<Tensor>& leaves) {
  kept_by_program = Tensor();
  for (const Tensor& leaf : leaves) {
    leaf.mutable_grad() = Tensor();
  }
}

Passed step(const std::optional<ActivationPlan>& plan, const Forward& forward, const std::vector<Tensor>& leaves) {
  reset(leaves);
  const MemoryMeter meter;
  std::optional<Rematerialize> scope;
  if (plan) {
    scope.emplace(*plan);
  }
  const Tensor loss = forward();
  if (scope) {
    EXPECT_EQ(scope->deviation(), "");
    scope.reset();
  }
  loss.backward();
  const int64_t peak = meter.report().peak_bytes;
  return {testing::gradients_of(leaves), peak};
}

void expect_plain_bits_and_predicted_peaks(const Forward& forward, const std::vector<Tensor>& leaves,
                                           detail::ProfileOptions options = {}) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  const Passed plain = step(std::nullopt, forward, leaves);
  reset(leaves);
  const plan::Profile profile = detail::profile_step(forward, std::move(options));
  const ActivationPlan everything = detail::unverified_plan(profile, Bytes::unlimited(), kSearch);
  EXPECT_EQ(everything.plain_peak_bytes, plain.peak_bytes);
  const int64_t smallest = smallest_feasible(profile).count();
  EXPECT_LT(smallest, plain.peak_bytes);
  for (int k = 0; k < 4; ++k) {
    const Bytes budget(smallest + (plain.peak_bytes - smallest) * k / 3);
    SCOPED_TRACE(budget.count());
    const ActivationPlan plan = detail::unverified_plan(profile, budget, kSearch);
    const Passed planned = step(plan, forward, leaves);
    EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
    EXPECT_EQ(planned.peak_bytes, plan.predicted_peak_bytes);
    reset(leaves);
    EXPECT_LE(detail::plan_activations(profile, forward, budget).predicted_peak_bytes, budget.count());
  }
}

/// A chain of layers, in the middle of which a hook goes backward through a graph of its own.
struct WithHook {
  using Solve = std::function<Tensor(const Tensor& once_more, const Tensor& place, const Tensor& gradient)>;

  WithHook() {
    torch::manual_seed(1);
    for (int i = 0; i < 6; ++i) {
      weights.push_back((torch::randn({64, 64}) / 8).requires_grad_());
    }
  }

  Tensor body(Tensor h, size_t first, size_t last) const {
    for (size_t i = first; i < last; ++i) {
      h = h.mm(weights[i]).tanh().square();
    }
    return h;
  }

  Tensor loss(const Solve& solve) const {
    const Tensor before = body(input, 0, 3);
    const Tensor z = cell(before, before);
    const Tensor place = z.detach().clone().requires_grad_(true);
    const Tensor once_more = cell(place, before.detach());
    z.register_hook([=](const Tensor& gradient) { return solve(once_more, place, gradient); });
    return body(z, 4, 6).mean();
  }

  // `of` is saved in the graph of the loss, which asks for it first, and in the hook's.
  Tensor cell(const Tensor& z, const Tensor& of) const { return (z.mm(weights[3]) * of).sigmoid() * of; }

  std::vector<Tensor> weights;
  Tensor input = torch::randn({128, 64});
};

Tensor iterated(const Tensor& once_more, const Tensor& place, const Tensor& gradient) {
  Tensor sum = gradient;
  for (int i = 0; i < 5; ++i) {
    sum = torch::autograd::grad({once_more}, {place}, {sum}, /*retain_graph=*/true)[0] + gradient;
  }
  return sum;
}

Tensor once(const Tensor& once_more, const Tensor& place, const Tensor& gradient) {
  return torch::autograd::grad({once_more}, {place}, {gradient})[0] + gradient;
}

// As deep equilibrium models have.
TEST(Rematerialize, PlansHooksThatGoBackwardThroughAGraphThatTheyKeep) {
  const WithHook model;
  expect_plain_bits_and_predicted_peaks([&] { return model.loss(iterated); }, model.weights);
}

TEST(Rematerialize, PlansHooksThatGoBackwardThroughAGraphOnce) {
  const WithHook model;
  expect_plain_bits_and_predicted_peaks([&] { return model.loss(once); }, model.weights);
}

TEST(Rematerialize, PlansHooksThatGoBackwardWherePlainTrainingDoesNotFit) {
  const WithHook model;
  const Forward forward = [&] { return model.loss(iterated); };
  const int64_t plain = step(std::nullopt, forward, model.weights).peak_bytes;
  expect_plain_bits_and_predicted_peaks(forward, model.weights, {.memory = Bytes(plain * 9 / 10)});
}

// A solver stops when it has converged: it may ask more often than it did when the plan was made.
TEST(Rematerialize, GivesAHookItsGraphMoreOftenThanPlanned) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  const WithHook model;
  int steps = 1;
  const Forward forward = [&] {
    return model.loss([&](const Tensor& once_more, const Tensor& place, const Tensor& gradient) {
      Tensor sum = gradient;
      for (int i = 0; i < steps; ++i) {
        sum = torch::autograd::grad({once_more}, {place}, {sum}, /*retain_graph=*/true)[0] + gradient;
      }
      return sum;
    });
  };
  reset(model.weights);
  plan::Profile profile = detail::profile_step(forward);
  for (plan::Operator& op : profile.operators) {
    op.seconds = 1;  // the same plan in each run of the test
  }
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  steps = 7;
  const Passed plain = step(std::nullopt, forward, model.weights), planned = step(plan, forward, model.weights);
  EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
  EXPECT_LE(planned.peak_bytes, plan.predicted_peak_bytes);
}

// Results beside the loss, for a figure that is printed; their graph is there until the next step's.
TEST(Rematerialize, CountsTheGraphOfAResultThatTheProgramKeeps) {
  const WithHook model;
  const Forward forward = [&] {
    const Tensor h = model.body(model.input, 0, 3);
    kept_by_program = h.mm(model.weights[4].detach()).exp().sigmoid().square().sum();
    return model.body(h, 3, 6).mean();
  };
  expect_plain_bits_and_predicted_peaks(forward,
                                        {model.weights[0], model.weights[1], model.weights[2], model.weights[3]});
}

// An operator that read the buffer has other results after the write, so its results stay.
TEST(Rematerialize, KeepsResultsOfABufferThatAHookWritesInBackward) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  const WithHook model;
  Tensor shift = torch::zeros_like(model.input);
  const Forward forward = [&] {
    Tensor h = model.input;
    for (size_t i = 0; i < model.weights.size(); ++i) {
      h = (i == 2 ? h.mm(model.weights[i]) + shift : h.mm(model.weights[i])).tanh().square();
      if (i == 4) {
        h.register_hook([&](const Tensor& gradient) { shift.add_(gradient.norm()); });
      }
    }
    return h.mean();
  };
  const auto step_from_zero = [&](const std::optional<ActivationPlan>& plan) {
    shift.zero_();
    Passed passed = step(plan, forward, model.weights);
    passed.gradients.push_back(shift.clone());
    return passed;
  };
  const Passed plain = step_from_zero(std::nullopt);
  ASSERT_TRUE(plain.gradients.back().ne(0).all().item<bool>());
  for (const Bytes memory : {Bytes::unlimited(), Bytes(plain.peak_bytes * 8 / 10)}) {
    SCOPED_TRACE(memory.str());
    reset(model.weights);
    const plan::Profile profile = detail::profile_step(forward, {.memory = memory});
    const Bytes smallest = smallest_feasible(profile);
    EXPECT_LT(smallest.count(), plain.peak_bytes);
    reset(model.weights);
    const Passed planned = step_from_zero(detail::plan_activations(profile, forward, smallest));
    EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
    EXPECT_LE(planned.peak_bytes, smallest.count());
  }
}

}  // namespace
}  // namespace snug::rematerialize_hooks_test
