// What snug has for modules, on one that Python exported.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/distributed/sharded_optimizer.h"
#include "snug/extra/ema.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/snapshot.h"
#include "snug/stepper.h"
#include "tests/exported/exported_files.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::exported_techniques_test {
namespace {

using snug::testing::ExportedCase;
using snug::testing::same_bits;

std::vector<at::Tensor> state_of(const ExportedModule& model) {
  std::vector<at::Tensor> state{at::globalContext().defaultGenerator(at::kCPU).get_state()};
  for (const auto& [name, tensor] : model.state_dict()) {
    state.push_back(tensor.clone());
  }
  for (const auto& parameter : model.parameters()) {
    if (parameter.grad().defined()) {
      state.push_back(parameter.grad().clone());
    }
  }
  return state;
}

std::vector<at::Tensor> large_batch(const ExportedCase& test) {
  std::vector<at::Tensor> inputs = test.inputs(0);
  for (at::Tensor& input : inputs) {
    input = at::cat({input, input, input, input, input, input, input, input});
  }
  return inputs;
}

class ExportedUnderAPlan : public snug::testing::WithExportedModels,
                           public ::testing::WithParamInterface<const char*> {};

// A plan within half of the activations, or the least that works; then the same step with it and without.
TEST_P(ExportedUnderAPlan, HasTheSameBitsAndThePeakThatWasPredicted) {
  const auto zero_gradients = [](const ExportedModule& model) {
    for (const at::Tensor& parameter : model.parameters()) {
      if (parameter.requires_grad()) {
        parameter.mutable_grad() = at::zeros_like(parameter);  // so that peaks are of activations
      }
    }
  };
  const ExportedCase plain(GetParam()), planned(GetParam()), measured(GetParam());
  const auto inputs = large_batch(plain);
  const auto step = [&](const ExportedCase& test) { return [&] { return test.model->forward(inputs); }; };
  zero_gradients(*plain.model);
  zero_gradients(*planned.model);
  zero_gradients(*measured.model);

  torch::manual_seed(3);
  int64_t plain_peak = 0;
  {
    MemoryMeter meter;
    step(plain)().backward();
    plain_peak = meter.report().peak_bytes;
  }
  const auto expected = state_of(*plain.model);

  const ActivationPlan plan = [&] {
    try {
      return plan_activations(step(measured), Bytes(plain_peak / 2));
    } catch (const BudgetExceeded& error) {
      return plan_activations(step(measured), error.smallest_feasible());
    }
  }();
  torch::manual_seed(3);
  MemoryMeter meter;
  at::Tensor loss;
  {
    const Rematerialize scope(plan);
    loss = step(planned)();
    EXPECT_EQ(scope.deviation(), "");
  }
  loss.backward();
  EXPECT_EQ(meter.report().peak_bytes, plan.predicted_peak_bytes);
  EXPECT_LT(plan.predicted_peak_bytes, plain_peak);
  EXPECT_TRUE(same_bits(state_of(*planned.model), expected));
}

INSTANTIATE_TEST_SUITE_P(Models, ExportedUnderAPlan, ::testing::Values("mlp", "conv", "lstm", "encoder", "no_grad"),
                         [](const auto& model) { return std::string(model.param); });

class ExportedTechniques : public snug::testing::WithExportedModels {
 protected:
  static std::vector<at::Tensor> step_states(const ExportedCase& test, const StepperOptions& options) {
    AdamW optimizer(test.model->parameters(), {.lr = 1e-2});
    return step_states(test, options, optimizer);
  }

  static std::vector<at::Tensor> step_states(const ExportedCase& test, const StepperOptions& options,
                                             torch::optim::Optimizer& optimizer) {
    Stepper stepper(*test.model, optimizer, options);
    torch::manual_seed(1234);
    for (int step = 0; step < 3; ++step) {
      stepper.step(Batch(large_batch(test)),
                   [&](const Batch& batch) { return Loss::mean(test.model->loss(batch.tensors()), batch.size()); });
    }
    optimizer.zero_grad();
    return state_of(*test.model);
  }
};

TEST_F(ExportedTechniques, ASnapshotResumesARunWithEmaAndAdamW8bit) {
  const testing::TemporaryFolder folder;
  const auto train = [&](const ExportedCase& test, int from, int to, bool load, bool save) {
    AdamW8bit optimizer(test.model->parameters(), {.lr = 1e-2});
    Ema ema(test.model->parameters(), {.decay = 0.9});
    SnapshotStore store(folder.path());
    const std::map<std::string, Stateful> parts{
        {"model", stateful(*test.model)}, {"optimizer", stateful(optimizer)}, {"ema", stateful(ema)}};
    if (load) {
      EXPECT_EQ(store.load_latest(parts), from);
    }
    for (int step = from; step < to; ++step) {
      torch::manual_seed(static_cast<uint64_t>(step));
      optimizer.zero_grad();
      test.model->forward(test.inputs(step)).backward();
      optimizer.step();
      ema.update();
    }
    if (save) {
      store.save(to, parts);
    }
    const Ema::Scope averages(ema);
    return state_of(*test.model);
  };
  const auto expected = train(ExportedCase("tied"), 0, 4, false, false);
  train(ExportedCase("tied"), 0, 2, false, true);
  EXPECT_TRUE(same_bits(train(ExportedCase("tied"), 2, 4, true, false), expected));
}

TEST_F(ExportedTechniques, DataParallelOfOneRankChangesNothing) {
  const ExportedCase alone("conv"), ranked("conv");
  const auto expected = step_states(alone, {});
  const auto group = init_process_group();
  DataParallel ddp(ranked.model, group);
  EXPECT_TRUE(same_bits(step_states(ranked, {.ranks = {.data_parallel = &ddp}}), expected));
}

TEST_F(ExportedTechniques, AnOptimizerInSharesOfOneRankChangesNothing) {
  const ExportedCase alone("tied"), sharded("tied");
  const auto expected = step_states(alone, {});
  ShardedOptimizer optimizer(sharded.model->parameters(), init_process_group(), [](const auto& groups) {
    return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 1e-2});
  });
  EXPECT_TRUE(same_bits(step_states(sharded, {}, optimizer), expected));
}

TEST_F(ExportedTechniques, CastingLeavesCountersAndMasks) {
  const ExportedCase test("conv");
  test.model->to(torch::kBFloat16);
  for (const auto& [name, tensor] : test.model->state_dict()) {
    EXPECT_EQ(tensor.scalar_type(), name.ends_with("num_batches_tracked") ? torch::kLong : torch::kBFloat16) << name;
  }
  auto inputs = test.inputs(0);
  EXPECT_EQ(test.model->forward({inputs[0].to(torch::kBFloat16), inputs[1]}).scalar_type(), torch::kBFloat16);
}

TEST_F(ExportedTechniques, ValuesLiveUntilTheirLastUse) {
  const ExportedCase test("mlp");
  const auto inputs = large_batch(test);
  const at::NoGradGuard guard;
  MemoryMeter meter;
  test.model->forward(inputs);
  const int64_t widest = 64 * 16 * 4;  // bytes of a hidden layer
  EXPECT_LE(meter.report().peak_bytes, 3 * widest);
}

}  // namespace
}  // namespace snug::exported_techniques_test
