#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/memory/limit.h"
#include "snug/optim/adamw.h"
#include "snug/optim/clip.h"
#include "snug/precision/autocast.h"
#include "snug/step/stepper.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

// What a step leaves behind when it fails, and what it must not touch when it does not.

namespace snug::stepper_safety_test {
namespace {

using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::make_mlp;
using testing::same_bits;
using torch::Tensor;

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Batch make_batch(int64_t items, uint64_t seed = 2) {
  torch::manual_seed(seed);
  return {torch::randn({items, 6}), torch::randn({items, 3})};
}

/// Everything that a step may change: parameters, and the tensors of the optimizer's state.
std::vector<Tensor> everything(const torch::nn::Sequential& model, const AdamW& optimizer) {
  auto tensors = clones_of(model->parameters());
  const auto state = testing::tensors_in(optimizer.state_dict());
  tensors.insert(tensors.end(), state.begin(), state.end());
  return tensors;
}

struct Training {
  torch::nn::Sequential model = make_mlp({6, 16, 3});
  AdamW optimizer{model->parameters(), {.lr = 0.01}};
  Stepper stepper;

  explicit Training(StepperOptions options = {}) : stepper(model, optimizer, options) {}

  Loss loss_of(const Batch& micro) {
    return Loss::sum((model->forward(micro[0]).to(torch::kFloat) - micro[1]).pow(2).sum(), micro[1].numel());
  }
  StepResult step(const Batch& batch) {
    return stepper.step(batch, [this](const Batch& micro) { return loss_of(micro); });
  }
  std::optional<StepResult> accumulate(const Batch& micro) {
    return stepper.accumulate(micro, [this](const Batch& m) { return loss_of(m); });
  }
  std::vector<Tensor> state() const { return everything(model, optimizer); }
};

// --- the plain loop, to the bit, with everything on

TEST(StepperBits, OfOneMicroBatchWithAdamWAutocastAndClippingAreThoseOfThePlainLoop) {
  for (const auto precision : {Precision::Float32, Precision::BFloat16}) {
    const Batch batch = make_batch(8);
    Training run({.precision = precision, .clip_norm = 0.5});
    auto model = make_mlp({6, 16, 3});
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    for (int step = 0; step < 4; ++step) {
      const auto result = run.step(batch);
      optimizer.zero_grad();
      Tensor loss;
      {
        std::optional<Autocast> autocast;
        if (precision == Precision::BFloat16) {
          autocast.emplace(torch::kCPU, torch::kBFloat16);
        }
        loss = (model->forward(batch[0]).to(torch::kFloat) - batch[1]).pow(2).sum() /
               static_cast<double>(batch[1].numel());
      }
      loss.backward();
      const Tensor norm = clip_grad_norm_(model->parameters(), 0.5);
      optimizer.step();
      EXPECT_EQ(static_cast<float>(result.loss()), loss.item<float>());
      EXPECT_EQ(result.grad_norm(), norm.item<float>());
      ASSERT_TRUE(same_bits(run.state(), everything(model, optimizer))) << step;
      EXPECT_TRUE(same_bits(gradients_of(*run.model), gradients_of(*model))) << "gradients stay readable";
    }
  }
}

TEST(StepperBits, OfLossScalingByPowersOfTwoDoNotChangeFloat32Mathematics) {
  // FP16 autocast on tiny sizes, once with a scale of 1 and once of 1024: no gradient here leaves FP16's normal range.
  const Batch batch = make_batch(4);
  Training one({.precision = Precision::Float16, .scaler = {.init_scale = 1}});
  Training many({.precision = Precision::Float16, .scaler = {.init_scale = 64}});
  one.step(batch);
  const auto result = many.step(batch);
  EXPECT_EQ(result.scale(), 64.0);
  for (size_t i = 0; i < one.model->parameters().size(); ++i) {
    // Subnormal FP16 numbers (below 6e-5) keep fewer digits, so only nearly the same.
    EXPECT_TRUE(testing::close_in_norm(many.model->parameters()[i], one.model->parameters()[i], 1e-3));
  }
}

TEST(StepperResult, WithoutClippingIsTheNormOfTheMeansGradient) {
  const Batch batch = make_batch(9);
  Training run({.micro_batch = 4});
  const auto result = run.step(batch);
  auto model = make_mlp({6, 16, 3});
  const Tensor loss = torch::mse_loss(model->forward(batch[0]), batch[1]);
  loss.backward();
  EXPECT_NEAR(result.grad_norm(), grad_norm(model->parameters()).item<double>(), 1e-6);
  EXPECT_NEAR(result.loss(), loss.item<double>(), 1e-6);
  EXPECT_EQ(result.micro_batches, 3);
  EXPECT_EQ(result.items, 27);
  EXPECT_GE(result.seconds, 0);
  EXPECT_EQ(result.bytes_sent, 0);
  EXPECT_GE(result.peak_bytes, live_bytes(torch::kCPU).count() - testing::bytes_of(run.state()));
}

TEST(StepperResult, PeakFallsWithTheMicroBatch) {
  const Batch batch = make_batch(512);
  const auto activations = [&](int64_t micro_batch) {
    Training run({.micro_batch = micro_batch});
    run.step(batch);  // makes the optimizer's state
    const int64_t before = live_bytes(torch::kCPU).count();
    return run.step(batch).peak_bytes - before;
  };
  EXPECT_LT(activations(32), activations(0) / 4);
}

// --- gradients

TEST(Stepper, ZeroesAlsoTheGradientsThatTheOptimizerDoesNotKnow) {
  const Batch batch = make_batch(4);
  auto model = make_mlp({6, 16, 3});
  torch::optim::SGD head(model->children().back()->parameters(), torch::optim::SGDOptions(0.0));  // lr 0: nothing moves
  Stepper stepper(model, head);
  const auto loss_of = [&](const Batch& micro) {
    return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
  };
  const double first = stepper.step(batch, loss_of).grad_norm();
  EXPECT_EQ(stepper.step(batch, loss_of).grad_norm(), first);
}

TEST(Stepper, LeavesFrozenParametersAndTheirGradientsAlone) {
  Training run;
  const Tensor frozen = run.model->parameters().front();
  frozen.set_requires_grad(false);
  Stepper stepper(run.model, run.optimizer);
  const Tensor before = frozen.detach().clone();
  const auto result = stepper.step(make_batch(4), [&](const Batch& micro) { return run.loss_of(micro); });
  EXPECT_TRUE(result.stepped());
  EXPECT_TRUE(same_bits(frozen, before));
  EXPECT_FALSE(frozen.grad().defined());
}

// A module that is registered twice: parameters() names its tensors twice, and there is one gradient.
struct SharedImpl : torch::nn::Module {
  torch::nn::Linear layer{6, 6};
  SharedImpl() {
    register_module("first", layer);
    register_module("second", layer);
  }
  Tensor forward(const Tensor& x) { return layer->forward(layer->forward(x).tanh()); }
};
TORCH_MODULE(Shared);

TEST(Stepper, TrainsASharedModuleAsOne) {
  torch::manual_seed(3);
  const Batch batch{torch::randn({5, 6}), torch::randn({5, 6})};
  torch::manual_seed(4);
  Shared model;
  torch::manual_seed(4);
  auto layer = torch::nn::Linear(6, 6);
  AdamW optimizer(model->parameters(), {.lr = 0.1});
  AdamW reference(layer->parameters(), {.lr = 0.1});
  Stepper stepper(model, optimizer, {.clip_norm = 0.1});
  for (int step = 0; step < 3; ++step) {
    stepper.step(batch, [&](const Batch& micro) {
      return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
    });
    reference.zero_grad();
    ((layer->forward(layer->forward(batch[0]).tanh()) - batch[1]).pow(2).sum() / 30.0).backward();
    clip_grad_norm_(layer->parameters(), 0.1);
    reference.step();
  }
  EXPECT_TRUE(same_bits(clones_of(model->layer->parameters()), clones_of(layer->parameters())));
}

// --- failures

TEST(StepperFailure, AnErrorInTheLossLeavesEverythingAsBeforeAndTheNextStepWorks) {
  const Batch batch = make_batch(8);
  Training plain({.precision = Precision::BFloat16, .micro_batch = 2});
  Training run({.precision = Precision::BFloat16, .micro_batch = 2});
  plain.step(batch);
  run.step(batch);
  const auto before = run.state();
  int calls = 0;
  EXPECT_EQ(error_of<Broken>([&] {
              run.stepper.step(batch, [&](const Batch& micro) {
                if (++calls == 3) {
                  throw Broken("in the third");
                }
                return run.loss_of(micro);
              });
            }),
            "in the third");
  EXPECT_TRUE(same_bits(run.state(), before));
  for (const Tensor& gradient : gradients_of(*run.model)) {
    EXPECT_FALSE(gradient.defined()) << "half a gradient must not be left";
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
  plain.step(batch);
  run.step(batch);
  EXPECT_TRUE(same_bits(run.state(), plain.state()));
}

TEST(StepperFailure, AnErrorWhileAccumulatingDropsTheWindow) {
  const Batch batch = make_batch(6);
  const auto parts = micro_batches(batch, 2);
  Training run({.accumulate = 3});
  const auto before = run.state();
  run.accumulate(parts[0]);
  EXPECT_THROW(run.stepper.accumulate(parts[1], [](const Batch&) -> Loss { throw Broken("now"); }), Broken);
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_FALSE(run.stepper.flush()) << "there is no window any more";
  Training fresh({.accumulate = 3});
  for (const Batch& part : parts) {
    run.accumulate(part);
    fresh.accumulate(part);
  }
  EXPECT_TRUE(same_bits(run.state(), fresh.state()));
}

TEST(StepperFailure, ABudgetBelowWhatIsAliveAlreadyIsBudgetExceededWithBothNumbers) {
  const auto budget = Bytes(live_bytes(torch::kCPU).count() + (1 << 20));
  Training run({.memory_budget = budget});
  const auto before = run.state();
  const Tensor ballast = torch::zeros({1 << 20});
  EXPECT_THAT(error_of<BudgetExceeded>([&] { run.step(make_batch(4)); }),
              AllOf(HasSubstr(live_bytes(torch::kCPU).str()), HasSubstr(budget.str())));
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_THROW(Training({.memory_budget = budget}), BudgetExceeded) << "known before the first step";
}

TEST(StepperFailure, ABudgetThatIsTooSmallLeavesTheScalerAsItWasAndALargerOneWorks) {
  const Batch batch = make_batch(64);
  const StepperOptions options{.precision = Precision::Float16, .scaler = {.init_scale = 256, .growth_interval = 1}};
  auto tight_options = options;
  Training run(options);
  run.step(batch);
  EXPECT_EQ(run.stepper.scaler().get_scale(), 512.0);
  const StateDict scaler = run.stepper.state_dict();
  const auto before = run.state();

  tight_options.memory_budget = Bytes(live_bytes(torch::kCPU).count() + 4096);
  Stepper tight(run.model, run.optimizer, tight_options);
  tight.load_state_dict(scaler);
  const auto loss_of = [&](const Batch& micro) { return run.loss_of(micro); };
  EXPECT_THAT(error_of<BudgetExceeded>([&] { tight.step(batch, loss_of); }), HasSubstr("memory_budget"));
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_EQ(tight.scaler().get_scale(), 512.0);
  EXPECT_EQ(tight.state_dict().get<StateDict>("scaler").get<int64_t>("_growth_tracker"), 0);
  EXPECT_NO_THROW(torch::empty({1 << 16})) << "the budget holds inside the step only";

  Training reference(options);
  reference.step(batch);
  reference.step(batch);
  run.step(batch);
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
}

TEST(StepperFailure, ABudgetHoldsForAccumulatedMicroBatchesToo) {
  const auto parts = micro_batches(make_batch(256), 128);
  Training run({.accumulate = 2, .memory_budget = Bytes(live_bytes(torch::kCPU).count() + 8192)});
  EXPECT_THROW(run.accumulate(parts[0]), BudgetExceeded);
  EXPECT_FALSE(run.stepper.flush());
}

// Whichever allocation of a step fails: nothing has changed, or the step was made as a whole; and then it goes on.
TEST(StepperFailure, WhicheverAllocationFailsTheStateIsTheOldOneOrTheWholeNewOne) {
  const Batch batch = make_batch(5);
  const GradScalerOptions plain{.init_scale = 8, .growth_interval = 1};
  const GradScalerOptions full{.init_scale = 8, .growth_interval = 1, .min_scale = 1, .hysteresis = 2};
  for (const auto& [precision, scaler] :
       {std::pair{Precision::Float32, plain}, {Precision::Float16, plain}, {Precision::Float16, full}}) {
    const StepperOptions options{.precision = precision, .micro_batch = 2, .clip_norm = 0.1, .scaler = scaler};
    for (const int steps_before : {0, 1}) {
      Training reference(options);
      for (int i = 0; i < steps_before; ++i) {
        reference.step(batch);
      }
      const auto old = reference.state();
      const double old_scale = reference.stepper.scaler().get_scale();
      reference.step(batch);
      const auto fresh = reference.state();
      const double new_scale = reference.stepper.scaler().get_scale();
      const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
        Training run(options);
        for (int i = 0; i < steps_before; ++i) {
          run.step(batch);
        }
        const bool failed = allocation.stops([&] { run.step(batch); });
        const bool stepped = !failed || !same_bits(clones_of(run.model->parameters()), {old.begin(), old.begin() + 4});
        ASSERT_TRUE(same_bits(run.state(), stepped ? fresh : old));
        ASSERT_EQ(run.stepper.scaler().get_scale(), stepped ? new_scale : old_scale);
        if (!stepped) {
          run.step(batch);
          ASSERT_TRUE(same_bits(run.state(), fresh));
        }
      });
      EXPECT_GT(failures, 50);
    }
  }
}

TEST(StepperFailure, AWriteBetweenAccumulatedMicroBatchesIsAnErrorThatNamesTheParameter) {
  const auto parts = micro_batches(make_batch(6), 2);
  Training run({.accumulate = 3});
  run.accumulate(parts[0]);
  {
    const torch::NoGradGuard no_grad;
    run.model->parameters()[2].add_(1);
  }
  EXPECT_THAT(error_of<ConfigError>([&] { run.accumulate(parts[1]); }), HasSubstr("'2.weight'"));
  for (const Batch& part : parts) {
    run.accumulate(part);
  }
}

TEST(StepperFailure, AWriteBeforeFlushIsAnErrorToo) {
  const auto parts = micro_batches(make_batch(6), 2);
  Training run({.accumulate = 3});
  run.accumulate(parts[0]);
  run.optimizer.step();  // the mistake that this check is for
  EXPECT_THAT(error_of<ConfigError>([&] { run.stepper.flush(); }), HasSubstr("'0.weight'"));
}

TEST(StepperFailure, CallsThatDoNotBelongInAnOpenWindowAreErrors) {
  const Batch batch = make_batch(4);
  Training run({.accumulate = 2});
  run.accumulate(batch);
  EXPECT_THROW(run.step(batch), ConfigError);
  EXPECT_TRUE(run.accumulate(batch)) << "the window is still good";
}

TEST(StepperFailure, AnEmptyBatchIsAnError) {
  Training run;
  EXPECT_THROW(run.step(make_batch(0)), ConfigError);
  EXPECT_THROW(run.accumulate(make_batch(0)), ConfigError);
}

// --- loss scaling

TEST(StepperScaling, ASkippedStepLeavesTheOptimizerUntouchedAndTheResultSaysSo) {
  const Batch batch = make_batch(4);
  Training run({.precision = Precision::Float16, .clip_norm = 1.0, .scaler = {.init_scale = 64}});
  run.step(batch);
  const auto before = run.state();
  const auto result = run.stepper.step(batch, [&](const Batch& micro) {
    const Loss loss = run.loss_of(micro);
    return Loss::sum(loss.value() * std::numeric_limits<float>::infinity(), loss.count());
  });
  EXPECT_FALSE(result.stepped());
  EXPECT_FALSE(std::isfinite(result.grad_norm()));
  EXPECT_EQ(result.scale(), 64.0) << "the scale that this step used";
  EXPECT_EQ(run.stepper.scaler().get_scale(), 32.0);
  EXPECT_TRUE(same_bits(run.state(), before));
}

TEST(StepperScaling, IsOffIfAskedAndForOtherPrecisions) {
  EXPECT_FALSE(Training({.precision = Precision::BFloat16}).stepper.scaler().is_enabled());
  EXPECT_FALSE(Training().stepper.scaler().is_enabled());
  EXPECT_FALSE(Training({.precision = Precision::Float16, .scaler = {.enabled = false}}).stepper.scaler().is_enabled());
  EXPECT_TRUE(Training({.precision = Precision::Float16}).stepper.scaler().is_enabled());
}

TEST(StepperPrecision, AutoIsResolvedOnceAndGoesWithTheState) {
  Training run({.precision = Precision::Auto});
  const Precision chosen = run.stepper.precision();
  EXPECT_TRUE(chosen == Precision::Float32 || chosen == Precision::BFloat16);
  StateDict state = run.stepper.state_dict();
  EXPECT_EQ(state.get<std::string>("precision"), to_string(chosen));
  state.set("precision", std::string("bfloat16"));
  Training resumed({.precision = Precision::Auto});
  resumed.stepper.load_state_dict(state);
  EXPECT_EQ(resumed.stepper.precision(), Precision::BFloat16) << "a run goes on in the precision it began with";
}

TEST(StepperPrecision, ComputesTheForwardInItAndTheLossSeesItsType) {
  const Batch batch = make_batch(4);
  for (const auto precision : {Precision::Float32, Precision::BFloat16, Precision::Float16}) {
    Training run({.precision = precision});
    c10::ScalarType seen = torch::kInt;
    run.stepper.step(batch, [&](const Batch& micro) {
      const Tensor y = run.model->forward(micro[0]);
      seen = y.scalar_type();
      return Loss::sum((y.to(torch::kFloat) - micro[1]).pow(2).sum(), micro[1].numel());
    });
    EXPECT_EQ(seen, compute_dtype(precision));
    for (const Tensor& parameter : run.model->parameters()) {
      EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
      EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
    }
  }
}

// --- models and batches of all kinds

TEST(Stepper, TakesHoldersModulesAndSharedPointersToThem) {
  const Batch batch = make_batch(4);
  auto holder = make_mlp({6, 3});
  torch::nn::Module& module = *holder;
  auto pointer = holder.ptr();
  torch::optim::SGD optimizer(holder->parameters(), torch::optim::SGDOptions(0.1));
  const auto loss_of = [&](const Batch& micro) { return Loss::sum(holder->forward(micro[0]).sum(), micro.size()); };
  EXPECT_TRUE(Stepper(holder, optimizer).step(batch, loss_of).stepped());
  EXPECT_TRUE(Stepper(module, optimizer).step(batch, loss_of).stepped());
  EXPECT_TRUE(Stepper(pointer, optimizer).step(batch, loss_of).stepped());
}

struct Sentences {  // a batch type of one's own, without batch_to
  std::vector<Tensor> rows;
};
int64_t batch_size(const Sentences& batch) { return static_cast<int64_t>(batch.rows.size()); }
Sentences batch_slice(const Sentences& batch, int64_t begin, int64_t end) {
  return {{batch.rows.begin() + begin, batch.rows.begin() + end}};
}

TEST(Stepper, TakesBatchTypesOfOnesOwn) {
  Sentences batch;
  for (int64_t i = 0; i < 5; ++i) {
    batch.rows.push_back(torch::full({i + 1, 6}, 0.1 * static_cast<double>(i)));
  }
  Training run({.micro_batch = 2});
  std::vector<int64_t> sizes;
  const auto result = run.stepper.step(batch, [&](const Sentences& micro) {
    sizes.push_back(batch_size(micro));
    const Tensor rows = torch::cat(micro.rows);
    return Loss::sum(run.model->forward(rows).pow(2).sum(), rows.size(0));
  });
  EXPECT_EQ(sizes, (std::vector<int64_t>{2, 2, 1}));
  EXPECT_EQ(result.items, 1 + 2 + 3 + 4 + 5);
  EXPECT_TRUE(result.stepped());
}

}  // namespace
}  // namespace snug::stepper_safety_test
