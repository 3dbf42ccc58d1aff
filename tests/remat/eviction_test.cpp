// Eviction: kept results that are dropped because an allocation finds no room, beyond the plan.

#include <algorithm>
#include <functional>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "snug/memory.h"
#include "snug/plan.h"
#include "src/memory/evictable.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::eviction_test {
namespace {

using plan::keep_all;
using plan::Simulator;
using testing::expect_same;
using testing::kSearch;
using testing::number_of_models;
using testing::OneThread;
using testing::Outcome;
using testing::plan_of;
using testing::random_model;
using testing::RandomModel;
using testing::smallest_feasible;
using testing::Step;
using torch::Tensor;

// None: out of memory.
std::optional<Outcome> run_within(Step& step, const ActivationPlan& plan, int64_t room) {
  step.reset();
  const MemoryLimit limit(torch::kCPU, live_bytes(torch::kCPU) + Bytes(room));
  try {
    return step.run(plan);
  } catch (const c10::OutOfMemoryError&) {
    return std::nullopt;
  }
}

// Each model runs under a plan that keeps everything, and under its fastest plan in half of the memory that plans can
// save, with less memory than the plan takes.
TEST(Eviction, KeepsTheBitsOfRandomModelsAndTheLimit) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  int64_t made = 0, tried = 0, evicting = 0;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    Step step(model);
    const Simulator simulator(detail::profile_step(step.forward()));
    const int64_t smallest = smallest_feasible(simulator.profile()).count();
    const Outcome plain = step.run(std::nullopt);
    const ActivationPlan all = *plan_of(simulator, keep_all(simulator.profile()));
    const int64_t half = (smallest + all.predicted_peak_bytes) / 2;
    for (const ActivationPlan& plan : {all, detail::unverified_plan(simulator.profile(), Bytes(half), kSearch)}) {
      for (const int64_t parts : {7, 4, 1}) {
        const int64_t room = smallest + (plan.predicted_peak_bytes - smallest) * parts / 8;
        const int64_t before = detail::evicted_bytes();
        const std::optional<Outcome> outcome = run_within(step, plan, room);
        ++tried;
        made += outcome ? 1 : 0;
        evicting += detail::evicted_bytes() > before ? 1 : 0;
        if (outcome) {
          expect_same(*outcome, plain);
          EXPECT_LE(outcome->peak_bytes, room);
        }
      }
    }
  }
  EXPECT_GT(made, tried * 7 / 10);
  EXPECT_GT(evicting, tried * 8 / 10);
}

constexpr int64_t kAll = int64_t{1} << 40;

// The gradient of `weight` after a step of `forward`, plainly and under a plan that keeps everything. Returns the bytes
// that were evicted.
int64_t expect_plain_gradient(const Tensor& weight, const std::function<Tensor()>& forward) {
  weight.mutable_grad() = Tensor();
  const ActivationPlan plan = *[&] {
    const Simulator simulator(detail::profile_step(forward));
    return plan_of(simulator, keep_all(simulator.profile()));
  }();
  weight.mutable_grad() = Tensor();
  forward().backward();
  const Tensor plain = weight.grad().clone();
  weight.mutable_grad() = Tensor();
  const int64_t before = detail::evicted_bytes();
  std::optional<Rematerialize> scope(plan);
  const Tensor loss = forward();
  EXPECT_EQ(scope->deviation(), "");
  scope.reset();
  loss.backward();
  EXPECT_TRUE(torch::equal(weight.grad(), plain));
  return detail::evicted_bytes() - before;
}

TEST(Eviction, IsUndoneBeforeAWriteThatWouldMakeItFinal) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad()), state = torch::randn({64, 64});
  const Tensor first = state.clone();
  EXPECT_GT(expect_plain_gradient(weight,
                                  [&] {
                                    state.copy_(first);
                                    const Tensor sum = ((weight + state).exp() + (weight + state).sin()).sum();
                                    detail::evict(kAll);
                                    state.add_(1);
                                    detail::evict(kAll);
                                    return sum;
                                  }),
            0);
}

// When the write comes, something must be dropped to make `a` again: not `b`, which depends on the state too.
TEST(Eviction, IsUndoneBeforeAWriteWithoutDroppingAnother) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad()), state = torch::randn({64, 64});
  const Tensor first = state.clone();
  EXPECT_GT(expect_plain_gradient(weight,
                                  [&] {
                                    state.copy_(first);
                                    const Tensor a = (weight + state).exp().sum();
                                    detail::evict(kAll);
                                    const Tensor b = (weight + state).sigmoid().sum(), c = weight.tanh().sum();
                                    const MemoryLimit limit(torch::kCPU, live_bytes(torch::kCPU) + Bytes(20 << 10));
                                    state.add_(1);
                                    return a + b + c;
                                  }),
            0);
}

// A program may fill memory through a pointer; no operator tells.
TEST(Eviction, LeavesWhatMayBeWrittenThroughPointers) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  for (const bool is_copy : {false, true}) {
    const Tensor ones = torch::ones({64, 64});
    EXPECT_GT(expect_plain_gradient(weight,
                                    [&] {
                                      Tensor mask = is_copy ? ones.clone() : torch::zeros({64, 64});
                                      std::fill_n(mask.data_ptr<float>(), mask.numel(), 0.5F);
                                      const Tensor product = weight.exp() * mask;
                                      mask = Tensor();
                                      detail::evict(kAll);
                                      return product.sin().sum();
                                    }),
              0)
        << "of weight.exp()";
  }
}

// Backward writes a buffer that forward has read.
TEST(Eviction, LeavesWhatIsMadeFromABufferThatBackwardWrites) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad()), buffer = torch::randn({64, 64});
  const Tensor first = buffer.clone();
  expect_plain_gradient(weight, [&] {
    buffer.copy_(first);
    const Tensor h = (weight + buffer).exp();
    const Tensor loss = h.sin().sum();
    loss.register_hook([&](const Tensor&) { buffer.add_(1); });
    detail::evict(kAll);
    return loss;
  });
}

TEST(Eviction, ServesSeveralPassesThroughAGraph) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  const auto forward = [&] {
    const Tensor loss = weight.exp().sin().tanh().sum();
    detail::evict(kAll);
    return loss;
  };
  const Simulator simulator(detail::profile_step(forward));
  const ActivationPlan plan = *plan_of(simulator, keep_all(simulator.profile()));
  const auto gradient = [&](bool planned) {
    weight.mutable_grad() = Tensor();
    std::optional<Rematerialize> scope;
    if (planned) {
      scope.emplace(plan);
    }
    const Tensor loss = forward();
    scope.reset();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return weight.grad().clone();
  };
  EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
}

// Counts its calls, so no second call computes the same.
Tensor with_count(const Tensor& x) {
  static int64_t calls = 0;
  return x + static_cast<double>(++calls % 2);
}

TORCH_LIBRARY_FRAGMENT(snug_eviction_test, library) { library.def("with_count(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(snug_eviction_test, CPU, library) { library.impl("with_count", &with_count); }

Tensor call_with_count(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("snug_eviction_test::with_count", "")
                             .typed<Tensor(const Tensor&)>();
  return op.call(x);
}

TEST(Eviction, LeavesTheResultsOfOtherLibrariesAndWhatOnlyTheyCanMake) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad()), x = torch::randn({64, 64});
  const auto even = [&] {  // each forward pass calls the operator with the same count
    call_with_count(x);
  };
  const int64_t result_itself = expect_plain_gradient(weight, [&] {
    even();
    const Tensor product = weight * call_with_count(x);
    detail::evict(kAll);
    return product.sum();
  });
  EXPECT_EQ(result_itself, 0);
  const int64_t source_is_gone = expect_plain_gradient(weight, [&] {
    even();
    const Tensor product = (weight + call_with_count(x)).exp();
    detail::evict(kAll);
    return product.sum();
  });
  EXPECT_EQ(source_is_gone, 0);
  const int64_t source_is_there = expect_plain_gradient(weight, [&] {
    even();
    const Tensor source = call_with_count(x);
    const Tensor sum = (weight + source).exp().sum();
    detail::evict(kAll);
    source.add_(1);
    return sum;
  });
  EXPECT_GT(source_is_there, 0) << "the tape holds the source, until the write";
}

// A trial tells whether a plan computes the same, in the bytes that were predicted.
TEST(Eviction, IsNoPartOfTrials) {
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  const auto forward = [&] {
    const Tensor product = (weight * weight.exp()).exp();
    detail::evict(kAll);
    return product.sum();
  };
  const int64_t before = detail::evicted_bytes();
  const ActivationPlan plan = plan_activations(forward, Bytes::unlimited());
  EXPECT_EQ(detail::evicted_bytes(), before);
}

}  // namespace
}  // namespace snug::eviction_test
