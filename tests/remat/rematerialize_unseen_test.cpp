// Rematerialize: values that operators do not explain. Writes through pointers, memory that the program lends, storages
// that are exchanged, tensors that are filled after autograd saved them, buffers that another branch writes; and memory
// that no allocator counts.

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/native/Resize.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "src/memory/operator_mode.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_unseen_blocks.h"
#include "tests/support/tensors.h"

namespace snug::rematerialize_unseen_test {
namespace {

using testing::kSearch;
using testing::same_bits;
using testing::smallest_feasible;
using testing::blocks::ScaleThroughPointer;
using torch::Tensor;
using Forward = std::function<Tensor()>;

// Layers of equal width, of which every result is saved for backward.
struct Layers {
  explicit Layers(int64_t layers) {
    torch::manual_seed(1);
    for (int64_t i = 0; i < layers; ++i) {
      weights.push_back((torch::randn({64, 64}) / 8).requires_grad_());
    }
  }
  Tensor loss(const std::function<Tensor(Tensor)>& between = [](Tensor h) { return h; }) const {
    Tensor h = input;
    for (const Tensor& weight : weights) {
      h = between(h.mm(weight)).tanh();
    }
    return h.square().mean();
  }

  std::vector<Tensor> weights;
  Tensor input = torch::randn({128, 64});
};

// With the least bytes for which one is found.
ActivationPlan checked_plan(const Forward& forward, Bytes budget = Bytes(1)) {
  try {
    return plan_activations(forward, budget);
  } catch (const BudgetExceeded& error) {
    return plan_activations(forward, error.smallest_feasible());
  }
}

struct Trained {
  std::vector<Tensor> gradients;
  std::string deviation;
  int64_t peak_bytes = 0;
};

// `before_backward` is what the program does between forward and backward.
Trained run(
    const std::optional<ActivationPlan>& plan, const Forward& forward, const std::vector<Tensor>& leaves,
    const std::function<void()>& before_backward = [] {}) {
  Trained result;
  const MemoryMeter meter;
  Tensor loss;
  {
    std::optional<Rematerialize> scope;
    if (plan) {
      scope.emplace(*plan);
    }
    loss = forward();
    result.deviation = scope ? scope->deviation() : "";
  }
  before_backward();
  result.gradients = torch::autograd::grad({loss}, leaves);
  result.peak_bytes = meter.report().peak_bytes;
  return result;
}

// That of pruning masks and annealed temperatures: when the plan is made the write changes nothing.
TEST(Rematerialize, RebuildsNothingFromWhatAFunctionWroteThroughAPointer) {
  const Layers layers(6);
  double factor = 1;
  const Forward forward = [&] {
    return layers.loss([&](const Tensor& h) { return ScaleThroughPointer::apply(h, factor); });
  };
  const ActivationPlan plan = checked_plan(forward);
  factor = 0.5;
  const Trained plain = run(std::nullopt, forward, layers.weights), planned = run(plan, forward, layers.weights);
  EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
  EXPECT_EQ(planned.deviation, "");
}

TEST(Rematerialize, NoticesAWriteThroughAPointerThatTheProfileDidNotHave) {
  const Layers layers(6);
  bool writes = false;
  const Forward forward = [&] {
    return layers.loss([&](const Tensor& h) { return writes ? ScaleThroughPointer::apply(h, 0.5) : h; });
  };
  const ActivationPlan plan = checked_plan(forward);
  writes = true;
  const Trained plain = run(std::nullopt, forward, layers.weights), planned = run(plan, forward, layers.weights);
  EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
  EXPECT_NE(planned.deviation, "");
}

// As a mode for tensors without values does at its end.
TEST(Rematerialize, NoticesThatSomebodySwitchedTheOperatorModeOff) {
  const Layers layers(6);
  bool switches_off = false;
  const Forward forward = [&] {
    return layers.loss([&](const Tensor& h) {
      if (switches_off) {
        c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, false);
      }
      return h;
    });
  };
  const ActivationPlan plan = checked_plan(forward);
  switches_off = true;
  const Trained plain = run(std::nullopt, forward, layers.weights), planned = run(plan, forward, layers.weights);
  EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
  EXPECT_THAT(planned.deviation, ::testing::HasSubstr("switched DispatchKey::Fake off"));
  EXPECT_THAT([&] { (void)checked_plan(forward); },
              ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("operators went unseen")));
}

// Parts of one storage have a count each.
TEST(Rematerialize, NoticesAWriteThroughAPointerToAPartWithACountOfItsOwn) {
  const Layers layers(6);
  double factor = 1;
  const Forward forward = [&] {
    return layers.loss([&](const Tensor& h) {
      std::vector<Tensor> halves = h.unsafe_chunk(2);
      halves[1] = ScaleThroughPointer::apply(halves[1], factor);
      return torch::cat(halves);
    });
  };
  const ActivationPlan plan = checked_plan(forward);
  factor = 0.5;
  EXPECT_TRUE(
      same_bits(run(plan, forward, layers.weights).gradients, run(std::nullopt, forward, layers.weights).gradients));
}

// The batch is copied out of a loader's buffer, so that the loader may go on while the step does.
TEST(Rematerialize, KeepsWhatIsMadeOfABufferThatIsFilledAnew) {
  constexpr int64_t kRows = 512, kWidth = 64;
  std::vector<float> staging(kRows * kWidth);
  const auto load = [&](int batch) {
    for (size_t i = 0; i < staging.size(); ++i) {
      staging[i] = static_cast<float>((i * 7 + static_cast<size_t>(batch) * 13) % 31) / 31;
    }
  };
  const Tensor weight = (torch::randn({kWidth, 4}) / 8).requires_grad_();
  const Forward forward = [&] {
    return torch::from_blob(staging.data(), {kRows, kWidth}).clone().mm(weight).square().mean();
  };
  load(0);
  const ActivationPlan plan = checked_plan(forward);
  const auto gradient = [&](const std::optional<ActivationPlan>& of) {
    load(1);
    return run(of, forward, {weight}, [&] { load(2); }).gradients;
  };
  EXPECT_TRUE(same_bits(gradient(plan), gradient(std::nullopt)));
}

TEST(Rematerialize, ReadsNoTableThatWentWithItsStackFrame) {
  const Tensor x = torch::rand({1 << 12}).requires_grad_();
  const Forward forward = [&] {
    Tensor h = x;
    for (int layer = 0; layer < 4; ++layer) {
      std::vector<float> table(static_cast<size_t>(x.numel()), 0.125F);
      h = (h + torch::from_blob(table.data(), {x.numel()})).tanh();
      std::fill(table.begin(), table.end(), std::numeric_limits<float>::quiet_NaN());
    }
    return h.sum();
  };
  const ActivationPlan plan = checked_plan(forward);
  EXPECT_TRUE(same_bits(run(plan, forward, {x}).gradients, run(std::nullopt, forward, {x}).gradients));
}

// As shards of weights that are gathered for a layer and let go of after it.
TEST(Rematerialize, RebuildsNothingFromMemoryThatTheProgramGaveBack) {
  const Layers layers(4);
  const Tensor table = torch::zeros({128, 64});
  const auto bytes = static_cast<int64_t>(table.nbytes());
  const Forward forward = [&] {
    at::native::resize_bytes_nocuda(table.storage(), bytes);
    table.fill_(0.125);
    const Tensor loss = layers.loss([&](const Tensor& h) { return h + table; });
    at::native::resize_bytes_nocuda(table.storage(), 0);
    return loss;
  };
  const ActivationPlan plan = checked_plan(forward);
  EXPECT_TRUE(
      same_bits(run(plan, forward, layers.weights).gradients, run(std::nullopt, forward, layers.weights).gradients));
}

TEST(Rematerialize, SaysThatMemoryWasGivenBackBeforeBackward) {
  const Layers layers(4);
  const Tensor table = torch::full({128, 64}, 0.125);
  const Forward forward = [&] { return layers.loss([&](const Tensor& h) { return h + table; }); };
  const ActivationPlan plan = checked_plan(forward);
  const auto give_back = [&] { at::native::resize_bytes_nocuda(table.storage(), 0); };
  EXPECT_THAT([&] { (void)run(plan, forward, layers.weights, give_back); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("or its memory given back")));
}

TEST(Rematerialize, HoldsNoMemoryThatTheProgramLends) {
  int alive = 0, most_alive = 0;
  const auto temporary = [&](int64_t count) {
    auto* memory = new float[static_cast<size_t>(count)];
    std::fill(memory, memory + count, 0.25F);
    most_alive = std::max(most_alive, ++alive);
    const auto release = [&alive](void* data) {
      --alive;
      delete[] static_cast<float*>(data);
    };
    return torch::from_blob(memory, {count}, release, torch::kFloat);
  };
  const Tensor x = torch::rand({1 << 10}).requires_grad_();
  const Forward forward = [&] {
    Tensor h = x;
    for (int layer = 0; layer < 20; ++layer) {
      h = (h + temporary(x.numel())).tanh();
    }
    return h.sum();
  };
  run(std::nullopt, forward, {x});
  const int plain = std::exchange(most_alive, 0);
  const ActivationPlan plan = checked_plan(forward);
  most_alive = 0;
  run(plan, forward, {x});
  EXPECT_EQ(most_alive, plain);
  EXPECT_EQ(alive, 0);
}

// As a batch that goes into the first layer as it is.
TEST(Rematerialize, RebuildsFromLentMemoryThatAutogradItselfKeeps) {
  const Layers layers(1);
  std::vector<float> batch(128 * 64, 0.5F);
  const plan::Profile profile = detail::profile_step(
      [&] { return torch::from_blob(batch.data(), {128, 64}).mm(layers.weights[0]).exp().square().mean(); });
  for (const plan::Operator& op : profile.operators) {
    EXPECT_TRUE(op.replayable) << op.name;
  }
}

TEST(PlanActivations, PutsNothingBackIntoMemoryThatIsGone) {
  const Layers layers(2);
  const Forward forward = [&] {
    std::vector<float> scale(64, 1);
    Tensor scales = torch::from_blob(scale.data(), {64});
    {
      const torch::NoGradGuard no_grad;
      scales.mul_(0.5);
    }
    return layers.loss([&](const Tensor& h) { return h + scales; });
  };
  EXPECT_TRUE(same_bits(run(checked_plan(forward), forward, layers.weights).gradients,
                        run(std::nullopt, forward, layers.weights).gradients));
}

// The last owner of an operand may be the call itself, where LibTorch makes it, or gives its memory to another tensor.
TEST(PlanActivations, PlansOperatorsThatLetGoOfTheirOperands) {
  const Tensor w = torch::randn({64}).requires_grad_(), x = torch::randn({16, 64});
  const std::array<Forward, 4> forwards{
      [&] { return torch::fft_irfft(torch::fft_rfft(x) * torch::fft_rfft(w).conj()).tanh().sum(); },
      [&] { return torch::imag(torch::complex(x * w, x).conj()).exp().sum(); },
      [&] {
        Tensor scratch = torch::ones({16, 64});
        {
          const torch::NoGradGuard no_grad;
          scratch.set_((x * 2).tanh());
        }
        return (x * w * scratch).sin().sum();
      },
      [&] {
        const Tensor places = torch::nonzero_static((x * w).detach() > 0, /*size=*/100);
        return (x * w).flatten().index_select(0, places.select(1, 1)).exp().sum();
      }};
  for (const Forward& forward : forwards) {
    const Trained plain = run(std::nullopt, forward, {w}), planned = run(checked_plan(forward), forward, {w});
    EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
    EXPECT_EQ(planned.deviation, "");
  }
}

// Autograd saves the statistics of one picture each, and the noise, before the operator fills them.
TEST(PlanActivations, ChecksWhatOperatorsFillAfterAutogradSavedIt) {
  namespace nn = torch::nn;
  torch::manual_seed(1);
  nn::Sequential norm(nn::Conv2d(3, 8, 3),
                      nn::InstanceNorm2d(nn::InstanceNorm2dOptions(8).affine(true).track_running_stats(true)),
                      nn::ReLU(), nn::Conv2d(8, 8, 3));
  nn::Sequential noisy(nn::Linear(16, 64), nn::RReLU(), nn::Linear(64, 64), nn::RReLU(), nn::Linear(64, 4));
  const Tensor pictures = torch::randn({8, 3, 16, 16}), rows = torch::randn({256, 16});
  for (const auto& [model, input] : {std::pair(norm, pictures), std::pair(noisy, rows)}) {
    const Forward forward = [&model = model, &input = input] {
      return nn::Sequential(model)->forward(input).square().mean();
    };
    const auto gradients = [&](const std::optional<ActivationPlan>& plan) {
      torch::manual_seed(2);
      return run(plan, forward, model->parameters()).gradients;
    };
    EXPECT_TRUE(same_bits(gradients(checked_plan(forward)), gradients(std::nullopt)));
  }
}

// Saved tensors that are not contiguous: to compare them is no operator of the step.
TEST(PlanActivations, KeepsWhatHasOtherBitsBehindSavedTransposedTensors) {
  const Layers layers(2);
  const Forward forward = [&] {
    const Tensor turned = layers.input.t().mul(layers.weights[0].mean()).exp().t();
    Tensor mask = torch::empty({128, 64});
    std::fill_n(mask.data_ptr<float>(), mask.numel(), 0.5F);
    return (turned.sigmoid() * mask * layers.weights[1].sum()).pow(2).sum();
  };
  EXPECT_TRUE(same_bits(run(checked_plan(forward), forward, layers.weights).gradients,
                        run(std::nullopt, forward, layers.weights).gradients));
}

// Memory that is free when operators run again holds the same values by luck.
TEST(PlanActivations, KeepsWhatWasWrittenThroughAPointerThoughFreeMemoryHoldsTheSame) {
  const Layers layers(2);
  const Forward forward = [&] {
    const auto filled = [] {
      Tensor mask = torch::empty({128, 64});
      std::fill_n(mask.data_ptr<float>(), mask.numel(), 0.5F);
      return mask;
    };
    const Tensor loss =
        ((layers.input * layers.weights[0].mean()).sigmoid() * filled() * layers.weights[1].sum()).pow(2).sum();
    const detail::UnseenOperators unseen;
    std::vector<Tensor> lucky(16);
    std::generate(lucky.begin(), lucky.end(), filled);
    return loss;
  };
  EXPECT_TRUE(same_bits(run(checked_plan(forward), forward, layers.weights).gradients,
                        run(std::nullopt, forward, layers.weights).gradients));
}

TEST(Rematerialize, RebuildsAndKeepsWhatDependsOnABufferBeforeAnotherBranchWritesIt) {
  const Layers layers(6);
  const Tensor temperature = torch::ones({64});
  bool decays = false;
  const Forward forward = [&] {
    temperature.fill_(1);
    const Tensor loss = layers.loss([&](const Tensor& h) { return h * temperature.exp(); });
    if (decays) {
      temperature.mul_(0.9);
    }
    return loss;
  };
  const ActivationPlan plan = checked_plan(forward);
  decays = true;
  const Trained plain = run(std::nullopt, forward, layers.weights), planned = run(plan, forward, layers.weights);
  EXPECT_TRUE(same_bits(planned.gradients, plain.gradients));
  EXPECT_NE(planned.deviation, "");
}

// Normalisation reads its statistics in one branch and moves them in the other.
TEST(Rematerialize, RebuildsAndKeepsWhatReadStatisticsBeforeAnotherBranchMovesThem) {
  const Layers layers(4);
  torch::nn::BatchNorm1d norm(64);
  bool trains = false;
  const Forward forward = [&] {
    norm->eval();
    const Tensor loss = layers.loss([&](const Tensor& h) { return norm->forward(h).exp(); });
    norm->train(trains);
    return loss + norm->forward(layers.input.mm(layers.weights[0])).square().mean();
  };
  const ActivationPlan plan = checked_plan(forward);
  trains = true;
  const std::vector<Tensor> before = testing::clones_of(norm->buffers());
  const auto gradients = [&](const std::optional<ActivationPlan>& of) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < before.size(); ++i) {
      norm->buffers()[i].copy_(before[i]);
    }
    const torch::AutoGradMode grad(true);
    return run(of, forward, layers.weights).gradients;
  };
  EXPECT_TRUE(same_bits(gradients(plan), gradients(std::nullopt)));
}

TEST(Rematerialize, StaysWithinThePlanInAPassThatKeepsItsGraphAndInTheNext) {
  const testing::OneThread scratch_of_several_threads_overlaps_by_chance;
  Layers layers(40);
  const Tensor x = layers.input = torch::randn({512, 64}).requires_grad_();
  const Forward forward = [&] { return layers.loss(); };
  const plan::Profile profile = detail::profile_step(forward);
  const int64_t plain = detail::unverified_plan(profile, Bytes::unlimited()).plain_peak_bytes;
  const ActivationPlan plan = detail::unverified_plan(profile, Bytes(plain * 4 / 10), kSearch);
  const Tensor expected = torch::autograd::grad({forward()}, {x})[0];
  const MemoryMeter meter;
  Tensor loss;
  {
    const Rematerialize scope(plan);
    loss = forward();
  }
  for (int pass = 0; pass < 3; ++pass) {
    EXPECT_TRUE(torch::equal(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/pass < 2)[0], expected));
  }
  EXPECT_LE(meter.report().peak_bytes, plan.predicted_peak_bytes);
}

TEST(Rematerialize, CountsNoBytesThatNoAllocatorGave) {
  const testing::OneThread scratch_of_several_threads_overlaps_by_chance;
  const Layers layers(6);
  const Forward forward = [&] {
    const Tensor shape =
        torch::empty({128, 8, 8}, torch::kMeta).transpose(1, 2).flatten(1) + torch::empty({128, 64}, torch::kMeta);
    return layers.loss([&](const Tensor& h) { return h.view(shape.sizes()); });
  };
  const plan::Profile profile = detail::profile_step(forward);
  const ActivationPlan plan = detail::unverified_plan(profile, smallest_feasible(profile), kSearch);
  for (const Tensor& weight : layers.weights) {
    weight.mutable_grad() = Tensor();
  }
  const MemoryMeter meter;
  Tensor loss;
  {
    const Rematerialize scope(plan);
    loss = forward();
    EXPECT_EQ(scope.deviation(), "");
  }
  loss.backward();
  EXPECT_EQ(meter.report().peak_bytes, plan.predicted_peak_bytes);
}

// The pass inside asks for its input. That stays for it, whether it can be made again, as random numbers can, or not,
// as what is read from memory that the program lends; and plans count on it.
void expect_within_the_plan(const std::function<Tensor()>& make_input) {
  const testing::OneThread scratch_of_several_threads_overlaps_by_chance;
  torch::manual_seed(1);
  torch::nn::Sequential critic;
  for (int i = 0; i < 4; ++i) {
    critic->push_back(torch::nn::Linear(32, 32));
    critic->push_back(torch::nn::Tanh());
  }
  critic->push_back(torch::nn::Linear(32, 1));
  const Forward forward = [&] {
    const Tensor x = make_input().requires_grad_(true);
    const Tensor slope =
        torch::autograd::grad({critic->forward(x).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return critic->forward(x).square().mean() + slope.square().mean();
  };
  const plan::Profile profile = detail::profile_step(forward);
  const int64_t plain = detail::unverified_plan(profile, Bytes::unlimited(), kSearch).plain_peak_bytes;
  const int64_t smallest = smallest_feasible(profile).count();
  const auto gradients = [&](const std::optional<ActivationPlan>& plan) {
    torch::manual_seed(3);
    critic->zero_grad();
    const MemoryMeter meter;
    Tensor loss;
    {
      std::optional<Rematerialize> scope;
      if (plan) {
        scope.emplace(*plan);
      }
      loss = forward();
    }
    loss.backward();
    if (plan) {
      EXPECT_EQ(meter.report().peak_bytes, plan->predicted_peak_bytes);
    }
    return testing::gradients_of(critic->parameters());
  };
  const std::vector<Tensor> expected = gradients(std::nullopt);
  for (int k = 0; k < 5; ++k) {
    const Bytes budget(smallest + (plain - smallest) * k / 4);
    SCOPED_TRACE(budget.count());
    EXPECT_TRUE(same_bits(gradients(detail::unverified_plan(profile, budget, kSearch)), expected));
  }
}

TEST(Rematerialize, StaysWithinThePlanWhereAPassInsideAsksForRandomNumbers) {
  expect_within_the_plan([] { return torch::rand({256, 32}); });
}

TEST(Rematerialize, StaysWithinThePlanWhereAPassInsideHoldsWhatCannotBeMadeAgain) {
  std::vector<float> lent(256 * 32, 0.25F);
  expect_within_the_plan([&] { return torch::from_blob(lent.data(), {256, 32}).neg(); });
}

}  // namespace
}  // namespace snug::rematerialize_unseen_test
