// Operators that run again draw what they drew in the forward: from the default generator, from one of the program's,
// and while other threads draw. Numbers that no operator draws are kept.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/extra/reversible.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/drawing_thread.h"
#include "tests/support/planned_step.h"
#include "tests/support/tensors.h"

namespace snug::random_numbers_test {
namespace {

using plan::Simulator;
using plan::Solver;
using plan::SolverOptions;
using testing::DrawingThread;
using testing::kSearch;
using testing::number_of_models;
using testing::random_model;
using testing::RandomModel;
using testing::same_bits;
using testing::smallest_feasible;
using torch::Tensor;
using Function = std::function<Tensor(Tensor)>;

constexpr SolverOptions kQuickSearch{.work = 100'000};

struct Way {
  std::string name;
  std::function<Tensor(const Function&, Tensor)> run;
};

std::vector<Way> ways() {
  const auto with = [](std::string name, const CheckpointOptions& options) {
    return Way{std::move(name),
               [options](const Function& f, Tensor x) { return checkpoint(options, f, std::move(x)); }};
  };
  const Way region = with("checkpoint", {});
  return {
      {"plain", [](const Function& f, Tensor x) { return f(std::move(x)); }},
      region,
      {"nested",
       [region](const Function& f, Tensor x) {
         return region.run([region, f](Tensor h) { return region.run(f, std::move(h)); }, std::move(x));
       }},
      with("all kept", {.policy = [](std::string_view) { return Keep::Save; }}),
      with("random ones kept",
           {.policy = policy_of({{"aten::rand", Keep::Save}, {"aten::native_dropout", Keep::Save}})}),
  };
}

// By operators that take a generator, that have a twin which does, and that have not.
Tensor times_random_factors(Tensor h) {
  h = torch::dropout(h * 1, 0.5, true);
  h = h * torch::rand(h.sizes());
  h = h * torch::randn_like(h);
  h = h * torch::randperm(h.numel(), torch::kFloat).view_as(h);
  h = std::get<0>(torch::native_dropout(h.sin(), 0.3, true));
  return h * torch::empty_like(h).normal_();
}

// Each number of the default generator since `before` is among these, in this order.
void expect_all_numbers_since(const RngState& before, const std::vector<Tensor>& numbers) {
  const RngState found = RngState::capture();
  before.restore();
  for (const Tensor& number : numbers) {
    EXPECT_TRUE(same_bits(number, DrawingThread::draw()));
  }
  EXPECT_TRUE(found.is_current());
}

// The gradient of a function whose backward disturbs nobody: with the numbers that another thread leaves.
struct Disturbed {
  Tensor loss, x = torch::linspace(0.1, 1, 64).requires_grad_();

  Disturbed(const Way& way, const Function& f) {
    torch::manual_seed(6);
    const DrawingThread other(DrawingThread::When::AtEveryOperator);
    loss = way.run(f, x).sum();
  }
  Tensor gradient() const { return torch::autograd::grad({loss}, {x})[0]; }
};

TEST(RandomNumbers, AreGivenOutOnceToAThreadThatDrawsAtEveryOperatorOfBackward) {
  const Function f = [](Tensor h) { return times_random_factors(times_random_factors(std::move(h)).exp()).sin(); };
  const Tensor expected = Disturbed(ways().front(), f).gradient();
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    const Disturbed disturbed(way, f);
    const RngState before = RngState::capture();
    std::vector<Tensor> numbers;
    {
      DrawingThread other(DrawingThread::When::AtEveryOperator);
      EXPECT_TRUE(same_bits(disturbed.gradient(), expected));
      numbers = other.take_numbers();
    }
    EXPECT_GT(numbers.size(), 0u);
    expect_all_numbers_since(before, numbers);
  }
}

TEST(RandomNumbers, AreGivenOutOnceToAThreadThatDrawsAllTheTimeDuringBackward) {
  const Function f = [](Tensor h) {
    for (int i = 0; i < 200; ++i) {
      h = torch::dropout(h, 0.1, true).sin() + torch::rand(h.sizes()) * torch::randn_like(h);
    }
    return h.sin();
  };
  const Tensor expected = Disturbed(ways()[0], f).gradient();
  const Disturbed disturbed(ways()[1], f);
  std::vector<Tensor> numbers;
  const RngState before = RngState::capture();
  std::atomic<bool> has_begun = false, is_over = false;
  std::thread other([&] {
    while (!is_over) {
      numbers.push_back(DrawingThread::draw());
      has_begun = true;
    }
  });
  while (!has_begun) {
    std::this_thread::yield();
  }
  const Tensor found = disturbed.gradient();
  is_over = true;
  other.join();
  EXPECT_TRUE(same_bits(found, expected));
  expect_all_numbers_since(before, numbers);
}

struct Outcome {
  Tensor result, gradient, next_of_default, next_of_own;
};

// From fixed seeds, with `f` of the input and of a generator of its own.
Outcome step(const Way& way, const std::function<Tensor(Tensor, at::Generator)>& f) {
  torch::manual_seed(5);
  at::Generator own = at::detail::createCPUGenerator(7);
  const Tensor x = torch::linspace(0.1, 1, 256).requires_grad_();
  const Tensor y = way.run([f, own](Tensor h) { return f(std::move(h), own); }, x);
  y.square().sum().backward();
  return {y.detach(), x.grad(), torch::rand({4}), torch::rand({4}, own, torch::TensorOptions())};
}

void expect_plain_outcome(const std::function<Tensor(Tensor, at::Generator)>& f) {
  const Outcome plain = step(ways().front(), f);
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    const Outcome found = step(way, f);
    EXPECT_TRUE(same_bits(found.result, plain.result));
    EXPECT_TRUE(same_bits(found.gradient, plain.gradient));
    EXPECT_TRUE(same_bits(found.next_of_default, plain.next_of_default));
    EXPECT_TRUE(same_bits(found.next_of_own, plain.next_of_own));
  }
}

TEST(RandomNumbers, OfARegionAreThoseOfTheForwardThoughAnotherThreadDraws) {
  const auto disturbed = [](const Way& way) {
    const DrawingThread other(DrawingThread::When::Always);
    return step(way, [](Tensor h, const at::Generator&) { return times_random_factors(std::move(h)); });
  };
  const Outcome plain = disturbed(ways()[0]);
  EXPECT_GT(plain.gradient.count_nonzero().item<int64_t>(), 0);
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    const Outcome found = disturbed(way);
    EXPECT_TRUE(same_bits(found.result, plain.result));
    EXPECT_TRUE(same_bits(found.gradient, plain.gradient));
  }
}

TEST(RandomNumbers, OfEveryKindOfOperatorAreDrawnAgain) {
  expect_plain_outcome([](Tensor h, const at::Generator&) { return times_random_factors(std::move(h)); });
}

TEST(RandomNumbers, OfAGeneratorOfTheProgramsOwnAreDrawnAgainAndItGoesOnOnce) {
  expect_plain_outcome([](Tensor h, at::Generator own) {
    h = h * torch::bernoulli(torch::full_like(h, 0.5), own);
    h = torch::dropout(h, 0.5, true) * torch::rand(h.sizes(), own, torch::TensorOptions());
    return h.square() * torch::empty_like(h).normal_(0, 1, own);
  });
}

// As a function written by hand does.
Tensor drawn_by_no_operator() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return torch::tensor(static_cast<double>(generator.get<at::CPUGeneratorImpl>()->random() % 7 + 1), torch::kFloat);
}

Tensor some_drawn_by_no_operator() {
  Tensor some = torch::ones({256});
  for (int i = 0; i < 256; ++i) {
    some.data_ptr<float>()[i] = drawn_by_no_operator().item<float>();
  }
  return some;
}

TEST(RandomNumbers, ThatNoOperatorDrawsAreThoseOfTheForward) {
  expect_plain_outcome([](Tensor h, const at::Generator&) {
    h = (h * drawn_by_no_operator()).exp();
    h = torch::dropout(h, 0.5, true) * torch::rand(h.sizes()) * drawn_by_no_operator();
    return h.sin() * drawn_by_no_operator() * drawn_by_no_operator();
  });
  expect_plain_outcome([](const Tensor& h, const at::Generator&) { return (h * some_drawn_by_no_operator()).exp(); });
  expect_plain_outcome([](const Tensor& h, const at::Generator&) {
    return torch::dropout(h.exp(), 0.5, true) * some_drawn_by_no_operator();
  });
  expect_plain_outcome([](const Tensor& h, const at::Generator&) {
    return torch::rand({256}) * h * some_drawn_by_no_operator() * torch::rand({256});
  });
}

TEST(RandomNumbers, OfARegionThatSetsTheSeedAreThoseOfTheForward) {
  expect_plain_outcome([](Tensor h, const at::Generator&) {
    h = torch::dropout(h.exp(), 0.5, true);
    torch::manual_seed(9);
    return torch::dropout(h.square(), 0.5, true).exp();
  });
}

TEST(RandomNumbers, OfATableThatTheRegionMakesOnceAreThoseOfTheForward) {
  const auto gradient = [](bool is_checkpointed) {
    torch::manual_seed(5);
    const auto table = std::make_shared<Tensor>();
    const Function f = [table](const Tensor& h) {
      if (!table->defined()) {
        *table = torch::rand({64}).repeat(4) * torch::randn({256});
      }
      return torch::dropout((h * *table * torch::rand({256})).exp(), 0.5, true);
    };
    const Tensor x = torch::linspace(0.1, 1, 256).requires_grad_();
    (is_checkpointed ? checkpoint(f, x) : f(x)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(RandomNumbers, OfReversibleBlocksAreDrawnAgainThoughAnotherThreadDraws) {
  at::Generator own = at::detail::createCPUGenerator(7);
  for (const bool is_disturbed : {false, true}) {
    std::optional<DrawingThread> other;
    if (is_disturbed) {
      other.emplace(DrawingThread::When::Always);
    }
    std::vector<Tensor> drawn;
    const auto half = [&](Tensor h) {
      drawn.push_back(torch::rand(h.sizes(), own, torch::TensorOptions()) *
                      torch::dropout(torch::ones({8}), 0.5, true));
      return h.sin() * drawn.back();
    };
    ReversibleSequential blocks;
    blocks.push_back(half, half).push_back(half, half);
    const Tensor x = torch::linspace(-1, 1, 16).requires_grad_();
    const Tensor y = blocks.forward(x);
    const RngState generators = RngState::capture();
    const Tensor of_own = own.get_state();
    const Tensor found = torch::autograd::grad({y.sum()}, {x})[0];
    EXPECT_TRUE(is_disturbed || generators.is_current());
    EXPECT_TRUE(torch::equal(own.get_state(), of_own));
    ASSERT_EQ(drawn.size(), 4u);
    const auto parts = x.chunk(2, -1);
    Tensor a = parts[0], b = parts[1];
    for (size_t i = 0; i < 4; i += 2) {
      a = a + b.sin() * drawn[i];
      b = b + a.sin() * drawn[i + 1];
    }
    // The rebuilt inputs are off by a few roundings. Other numbers would be off by as much as the gradient.
    EXPECT_TRUE(testing::close_in_norm(found, torch::autograd::grad({a.sum() + b.sum()}, {x})[0], 1e-5));
  }
}

// --- plans

ActivationPlan most_frugal(const std::function<Tensor()>& forward) {
  const plan::Profile profile = detail::profile_step(forward);
  return detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
}

TEST(RandomNumbers, OfAPlanAreThoseOfTheForwardThoughAnotherThreadDraws) {
  const Tensor x = torch::ones({64, 64}).requires_grad_();
  Tensor y;
  const auto forward = [&] {
    y = times_random_factors(times_random_factors(x).sin());
    return y.sum();
  };
  const ActivationPlan plan = most_frugal(forward);
  const auto gradient = [&](bool planned) {
    torch::manual_seed(4);
    const DrawingThread other(DrawingThread::When::Forward);
    std::optional<Rematerialize> scope;
    if (planned) {
      scope.emplace(plan);
    }
    const Tensor loss = forward();
    const auto replayed = planned ? scope->replayed_operators() : nullptr;
    scope.reset();
    const auto found = torch::autograd::grad({loss}, {x})[0];
    EXPECT_TRUE(!planned || *replayed > 0);
    return std::pair(found, torch::rand({4}));
  };
  const auto [plain, next] = gradient(false);
  const auto [found, next_too] = gradient(true);
  EXPECT_TRUE(same_bits(found, plain));
  EXPECT_TRUE(same_bits(next_too, next));
}

TEST(RandomNumbers, OfAnyRandomModelAreThoseOfPlainTrainingThoughAnotherThreadDraws) {
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    testing::Step step(model);
    const Simulator simulator(detail::profile_step(step.forward()));
    const Bytes smallest(Solver(simulator, kQuickSearch).smallest().peak_bytes);
    const ActivationPlan plan = detail::unverified_plan(simulator.profile(), smallest, kQuickSearch);
    const auto run = [&](const std::optional<ActivationPlan>& with) {
      const DrawingThread other(DrawingThread::When::Forward);
      return step.run(with);
    };
    const testing::Outcome plain = run(std::nullopt);
    expect_same(run(plan), plain);
    step.reset();
    const DrawingThread other(DrawingThread::When::Forward);
    checkpoint(model.loss, model.input).backward();
    EXPECT_TRUE(same_bits(testing::gradients_of(model.leaves()), plain.gradients));
    EXPECT_TRUE(plain.generators.is_current());
    const DrawingThread more(DrawingThread::When::AtEveryOperator);
    EXPECT_NO_THROW(checkpoint(model.loss, model.input).backward());
  }
}

bool is_replayable(const plan::Profile& profile, const std::string& name) {
  for (const plan::Operator& op : profile.operators) {
    if (op.name == name) {
      return op.replayable;
    }
  }
  ADD_FAILURE() << "no " << name;
  return false;
}

TEST(RandomNumbers, AreNoReasonToKeepWhatAnOperatorMade) {
  const Tensor x = torch::rand({1, 2, 32, 16}).requires_grad_();
  const plan::Profile profile = detail::profile_step([&] {
    const Tensor mixed = torch::scaled_dot_product_attention(x.exp(), x.sin(), x.cos());
    return (times_random_factors(mixed) * torch::dropout(mixed, 0.5, true)).sum();
  });
  for (const char* name : {"aten::_scaled_dot_product_flash_attention_for_cpu", "aten::rand", "aten::randn_like",
                           "aten::randperm", "aten::native_dropout", "aten::bernoulli_.float", "aten::normal_"}) {
    EXPECT_TRUE(is_replayable(profile, name)) << name;
  }
}

}  // namespace
}  // namespace snug::random_numbers_test
