#include "snug/step/stepper.h"

#include <gtest/gtest.h>

#include "snug/activations/sequential.h"
#include "snug/core/error.h"
#include "snug/memory/limit.h"
#include "snug/optim/adamw.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_model.h"

namespace snug::stepper_test {
namespace {

using testing::clones_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using testing::same_bits;
using testing::squared_error;
using testing::tiny_batch;
using testing::tiny_model;

struct Training {
  explicit Training(StepperOptions options = {}, double dropout = 0)
      : model(tiny_model(dropout)),
        optimizer(model->parameters(), torch::optim::SGDOptions(0.1)),
        stepper(model, optimizer, options) {}

  StepResult step(const Batch& batch) {
    return stepper.step(batch, [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); });
  }
  std::optional<StepResult> accumulate(const Batch& micro) {
    return stepper.accumulate(micro, [&](const Batch& m) { return squared_error(model->forward(m[0]), m[1]); });
  }
  std::vector<torch::Tensor> parameters() { return clones_of(model->parameters()); }

  torch::nn::Sequential model;
  torch::optim::SGD optimizer;
  Stepper stepper;
};

// The loop that everybody writes.
std::vector<torch::Tensor> plain_training(const Batch& batch, int steps) {
  auto model = tiny_model();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    const auto loss = (model->forward(batch[0]) - batch[1]).square().sum() / static_cast<double>(batch[1].numel());
    loss.backward();
    optimizer.step();
  }
  return clones_of(model->parameters());
}

TEST(Stepper, GivesTheBitsOfAPlainLoopWhenNothingIsSplit) {
  const Batch batch = tiny_batch(12);
  Training run;
  for (int i = 0; i < 5; ++i) {
    run.step(batch);
  }
  EXPECT_TRUE(same_bits(run.parameters(), plain_training(batch, 5)));
}

// Each of the 100 gradients is a sum of at most 12 * 2 products' terms in another order. A sum of n terms carries a relative error of at
// most (n - 1) u of the sum of magnitudes, u = 2^-24 (Higham 2002, section 4.2): here 2.8e-6 for both orders together. The weights
// move by at most lr = 0.1 times that per step, and gradient descent on this small problem does not amplify: 100 * 0.1 * 2.8e-6.
TEST(Stepper, SplitsEqualTheFullBatchAfter100StepsOfSgd) {
  const Batch batch = tiny_batch(12);
  const auto whole = plain_training(batch, 100);
  for (const int64_t size : {1, 4, 5, 11}) {
    Training run({.micro_batch = size});
    for (int i = 0; i < 100; ++i) {
      const auto result = run.step(batch);
      EXPECT_EQ(result.micro_batches, (12 + size - 1) / size);
      EXPECT_EQ(result.items, 24);
    }
    EXPECT_LT(testing::relative_difference(run.parameters(), whole), 2.8e-5) << "micro-batches of " << size;
  }
}

TEST(Stepper, ReportsTheStep) {
  const Batch batch = tiny_batch(12);
  Training run({.micro_batch = 4, .clip_norm = 1e-3});
  const auto before = run.parameters();
  const auto result = run.step(batch);
  EXPECT_TRUE(result.stepped());
  EXPECT_GT(result.grad_norm(), 1e-3);
  EXPECT_EQ(result.scale(), 1.0);
  EXPECT_GT(result.peak_bytes, 0);
  EXPECT_EQ(result.bytes_sent, 0);
  auto reference = tiny_model();
  const double loss = torch::mse_loss(reference->forward(batch[0]), batch[1]).item<double>();
  EXPECT_NEAR(result.loss(), loss, 1e-6);
  double moved = 0;
  const auto after = run.parameters();
  for (size_t i = 0; i < after.size(); ++i) {
    moved += (after[i] - before[i]).square().sum().item<double>();
  }
  EXPECT_NEAR(std::sqrt(moved), 0.1 * 1e-3, 1e-7);  // clipped to 1e-3, times the learning rate
}

TEST(Stepper, SkipsAStepWithoutItems) {
  Training run;
  const auto before = run.parameters();
  const auto result = run.stepper.step(
      tiny_batch(4), [&](const Batch& micro) { return Loss::mean(run.model->forward(micro[0]).sum() * 0 / 0, 0); });
  EXPECT_FALSE(result.stepped());
  EXPECT_EQ(result.items, 0);
  EXPECT_TRUE(std::isnan(result.loss()));
  EXPECT_TRUE(same_bits(run.parameters(), before));
}

TEST(Stepper, NeverSplitsAWhole) {
  const auto whole = [](Training& run) {
    return
        [&run](const Batch& micro) { return Loss::whole((run.model->forward(micro[0]) - micro[1]).square().mean()); };
  };
  Training run;
  EXPECT_TRUE(run.stepper.step(tiny_batch(4), whole(run)).stepped());
  Training split({.micro_batch = 2});
  EXPECT_THROW(split.stepper.step(tiny_batch(4), whole(split)), ConfigError);
  EXPECT_THROW(split.stepper.step(tiny_batch(2), whole(split)), ConfigError) << "also where nothing would be split";
  Training accumulated({.accumulate = 2});
  EXPECT_THROW(accumulated.stepper.accumulate(tiny_batch(4), whole(accumulated)), ConfigError);
}

TEST(Stepper, AWriteInsideTheWindowIsAnErrorThatNamesTheParameter) {
  Training run({.micro_batch = 2});
  const auto write = [&](const Batch& micro) {
    const auto loss = squared_error(run.model->forward(micro[0]), micro[1]);
    const torch::NoGradGuard no_grad;
    run.model->parameters()[0].mul_(1);
    return loss;
  };
  try {
    run.stepper.step(tiny_batch(4), write);
    FAIL() << "the write was not noticed";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("0.weight"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(run.step(tiny_batch(4)).stepped());
}

class Accumulation : public ::testing::Test {
 protected:
  const Batch batch = tiny_batch(10);
  const std::vector<Batch> parts = micro_batches(batch, 4);  // 4, 4, 2
};

TEST_F(Accumulation, StepsAfterEveryK) {
  Training run({.accumulate = 3});
  EXPECT_FALSE(run.accumulate(parts[0]));
  EXPECT_FALSE(run.accumulate(parts[1]));
  const auto result = run.accumulate(parts[2]);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->items, 20);
  EXPECT_LT(testing::relative_difference(run.parameters(), plain_training(batch, 1)), 2.8e-7);
  EXPECT_FALSE(run.stepper.flush());
}

TEST_F(Accumulation, AnExactTailIsWeightedByItsItems) {
  Training run({.accumulate = 4, .tail = Tail::Exact});
  for (const Batch& part : parts) {
    EXPECT_FALSE(run.accumulate(part));
  }
  const auto result = run.stepper.flush();
  ASSERT_TRUE(result);
  EXPECT_EQ(result->micro_batches, 3);
  EXPECT_LT(testing::relative_difference(run.parameters(), plain_training(batch, 1)), 2.8e-7);
}

TEST_F(Accumulation, ADroppedTailLeavesNoTrace) {
  Training run({.accumulate = 2, .tail = Tail::Drop});
  const auto before = run.parameters();
  EXPECT_FALSE(run.accumulate(parts[0]));
  EXPECT_FALSE(run.stepper.flush());
  EXPECT_TRUE(same_bits(run.parameters(), before));
  run.accumulate(parts[1]);
  ASSERT_TRUE(run.accumulate(parts[2]));
  Training other({.micro_batch = 4});
  other.step(batch_slice(batch, 4, 10));
  EXPECT_LT(testing::relative_difference(run.parameters(), other.parameters()), 2.8e-7);
}

TEST_F(Accumulation, ACarriedTailIsFinishedInTheNextEpoch) {
  Training run({.accumulate = 2, .tail = Tail::Carry});
  EXPECT_FALSE(run.accumulate(parts[0]));
  EXPECT_FALSE(run.stepper.flush());
  EXPECT_THROW((void)run.stepper.state_dict(), ConfigError);
  const auto result = run.accumulate(parts[1]);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->items, 16);
}

// A batch type of one's own, standing for one that lies on another device: batch_to copies, and counts what is alive.
struct Counted {
  torch::Tensor x;
  std::shared_ptr<int64_t> alive;
};
int64_t most_alive = 0;
int64_t now_alive = 0;
int64_t batch_size(const Counted& batch) { return batch.x.size(0); }
Counted batch_slice(const Counted& batch, int64_t begin, int64_t end) {
  return {batch.x.slice(0, begin, end), nullptr};
}
Counted batch_to(const Counted& batch, c10::Device) {
  most_alive = std::max(most_alive, ++now_alive);
  return {batch.x.clone(), {new int64_t, [](int64_t* p) {
                              --now_alive;
                              delete p;
                            }}};
}

TEST(Stepper, HoldsOnlyTheCurrentAndTheNextMicroBatchOnTheDevice) {
  auto model = tiny_model();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer, {.micro_batch = 100});
  const Counted batch{torch::randn({1000, 6}), nullptr};
  const int64_t before = live_bytes(torch::kCPU).count();
  int64_t most_bytes = 0;
  int64_t seen = 0;
  most_alive = now_alive = 0;
  stepper.step(batch, [&](const Counted& micro) {
    most_bytes = std::max(most_bytes, live_bytes(torch::kCPU).count() - before);
    seen += micro.x.size(0);
    return Loss::sum(model->forward(micro.x.narrow(0, 0, 1)).sum(), 1);
  });
  EXPECT_EQ(seen, 1000);
  EXPECT_EQ(most_alive, 2);
  EXPECT_EQ(now_alive, 0);
  const int64_t micro_bytes = 100 * 6 * 4;
  int64_t gradients = 0;
  for (const auto& p : model->parameters()) {
    gradients += p.numel() * 4;
  }
  EXPECT_LE(most_bytes, 2 * micro_bytes + gradients + 64);  // and a few scalars of loss arithmetic
}

TEST(Stepper, ABudgetThatIsTooSmallChangesNothing) {
  const Batch batch = tiny_batch(4096);
  auto model = tiny_model();
  AdamW optimizer(model->parameters());
  const auto before = clones_of(model->parameters());
  const auto loss_of = [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); };
  const Bytes budget(live_bytes(torch::kCPU).count() + 300'000);
  Stepper whole(model, optimizer, {.memory_budget = budget, .plan = false});
  EXPECT_THROW(whole.step(batch, loss_of), BudgetExceeded);
  EXPECT_TRUE(same_bits(clones_of(model->parameters()), before));
  EXPECT_TRUE(optimizer.state().empty());
  Stepper parts(model, optimizer, {.micro_batch = 64, .memory_budget = budget, .plan = false});
  const auto result = parts.step(batch, loss_of);
  EXPECT_TRUE(result.stepped());
  EXPECT_LE(result.peak_bytes, budget.count());
}

TEST(Stepper, AnyFailingAllocationLeavesTheOldStepOrTheWholeNewOne) {
  const Batch batch = tiny_batch(8);
  const auto step = [&](auto& model, auto& stepper) {
    return stepper.step(batch, [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); });
  };
  auto reference_model = tiny_model();
  AdamW reference_optimizer(reference_model->parameters());
  Stepper reference(reference_model, reference_optimizer, {.micro_batch = 4, .clip_norm = 0.1});
  step(reference_model, reference);
  const auto after_one = clones_of(reference_model->parameters());
  step(reference_model, reference);
  const auto after_two = clones_of(reference_model->parameters());

  for_each_failing_allocation([&](FailingAllocation& allocation) {
    auto model = tiny_model();
    AdamW optimizer(model->parameters());
    Stepper stepper(model, optimizer, {.micro_batch = 4, .clip_norm = 0.1});
    const auto before = clones_of(model->parameters());
    const bool failed = allocation.stops([&] { step(model, stepper); });
    const auto now = clones_of(model->parameters());
    const bool old = same_bits(now, before);
    EXPECT_TRUE(old || same_bits(now, after_one));
    if (failed && old) {
      step(model, stepper);
    }
    EXPECT_TRUE(same_bits(clones_of(model->parameters()), after_one));
    step(model, stepper);
    EXPECT_TRUE(same_bits(clones_of(model->parameters()), after_two));
  });
}

TEST(Stepper, RefusesOptionsThatCannotWork) {
  auto model = tiny_model();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_THROW(Stepper(model, optimizer, {.micro_batch = -1}), ConfigError);
  EXPECT_THROW(Stepper(model, optimizer, {.accumulate = 0}), ConfigError);
  EXPECT_THROW(Stepper(model, optimizer, {.clip_norm = -1}), ConfigError);
  torch::nn::Sequential empty{torch::nn::Tanh()};
  EXPECT_THROW(Stepper(empty, optimizer), ConfigError);
}

TEST(Stepper, ScalesTheLossOnlyInFloat16AndSkipsWhatIsNotFinite) {
  const Batch batch = tiny_batch(4);
  Training run({.precision = Precision::Float16, .scaler = {.init_scale = 1024}});
  auto result = run.step(batch);
  EXPECT_EQ(result.scale(), 1024.0);
  EXPECT_TRUE(result.stepped());
  const auto before = run.parameters();
  result = run.stepper.step(batch, [&](const Batch& micro) {
    return Loss::sum(run.model->forward(micro[0]).to(torch::kFloat).sum() * std::numeric_limits<float>::infinity(), 1);
  });
  EXPECT_FALSE(result.stepped());
  EXPECT_TRUE(same_bits(run.parameters(), before));
  EXPECT_EQ(run.stepper.scaler().get_scale(), 512.0);

  Training low({.precision = Precision::BFloat16});
  EXPECT_EQ(low.step(batch).scale(), 1.0);
}

TEST(Stepper, GoesOnWithTheScaleThatWasSaved) {
  const Batch batch = tiny_batch(4);
  const StepperOptions options{.precision = Precision::Float16, .scaler = {.init_scale = 8, .growth_interval = 2}};
  Training run(options);
  for (int i = 0; i < 3; ++i) {
    run.step(batch);
  }
  Training resumed(options);
  resumed.stepper.load_state_dict(run.stepper.state_dict());
  run.step(batch);
  resumed.step(batch);
  EXPECT_EQ(run.stepper.scaler().get_scale(), 32.0);
  EXPECT_EQ(resumed.stepper.scaler().get_scale(), 32.0);
  Training other;
  EXPECT_THROW(other.stepper.load_state_dict(run.stepper.state_dict()), ConfigError);
}

}  // namespace
}  // namespace snug::stepper_test
