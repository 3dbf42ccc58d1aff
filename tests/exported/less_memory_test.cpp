// Exported models train in less memory with the bits of Python's plain training.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/stepper.h"
#include "tests/exported/as_python.h"

namespace snug::exported_less_memory_test {
namespace {

using snug::testing::ExportedCase;
using snug::testing::train_as_python;

constexpr int kMicroBatch = 4;  // of with_models.py

class ExportedInLessMemory : public snug::testing::WithExportedModels,
                             public ::testing::WithParamInterface<const char*> {};

/// A plan for half of a step's activations.
ActivationPlan plan_for_half(const ExportedCase& test) {
  const auto inputs = test.inputs(0);
  const auto loss_of = [&] { return test.model->forward(inputs); };
  int64_t gradients = 0;
  for (const at::Tensor& parameter : test.model->parameters()) {
    gradients += parameter.requires_grad() ? static_cast<int64_t>(parameter.nbytes()) : 0;
  }
  const int64_t plain = plan_activations(loss_of, Bytes::unlimited()).predicted_peak_bytes;
  return plan_activations(loss_of, Bytes((plain + gradients) / 2));
}

/// Training by a Stepper with micro-batches.
struct ByStepper {
  ByStepper(const char* name, Bytes budget)
      : test(name),
        stepper(*test.model, optimizer,
                {.micro_batch = kMicroBatch, .budget = {.memory = budget, .split_batch_norm = true}}) {}

  at::Tensor step(const std::vector<at::Tensor>& batch) {
    last = stepper.step(Batch(batch), [&](const Batch& micro) {
      return Loss::mean(test.model->forward(micro.tensors()), micro.size());
    });
    return at::scalar_tensor(last.loss(), at::kFloat);
  }

  ExportedCase test;
  AdamW optimizer{test.model->parameters(), {.lr = 1e-2}};
  Stepper stepper;
  StepResult last;
};

/// What a step takes, less a quarter of its activations.
Bytes most_of_a_step(const char* name) {
  ByStepper plain(name, Bytes::unlimited());
  plain.step(plain.test.inputs(0));
  plain.step(plain.test.inputs(1));  // the first one makes the optimizer's state
  return Bytes(plain.last.peak_bytes - plain.last.activation_peak_bytes / 4);
}

TEST_P(ExportedInLessMemory, HalfOfTheActivationsGiveTheBitsOfPythonAndThePeakThatWasPredicted) {
  ExportedCase test(GetParam());
  AdamW optimizer(test.model->parameters(), {.lr = 1e-2});
  const ActivationPlan plan = plan_for_half(test);
  train_as_python(test, "same", optimizer, [&](const auto& batch) {
    optimizer.zero_grad();
    MemoryMeter meter;
    at::Tensor loss;
    {
      const Rematerialize scope(plan);
      loss = test.model->forward(batch);
      EXPECT_EQ(scope.deviation(), "");
    }
    loss.backward();
    EXPECT_EQ(meter.report().peak_bytes, plan.predicted_peak_bytes);
    optimizer.step();
    return loss;
  });
}

TEST_P(ExportedInLessMemory, MicroBatchesWithinABudgetGiveTheBitsOfPython) {
  const Bytes budget = most_of_a_step(GetParam());
  ByStepper training(GetParam(), budget);
  train_as_python(training.test, "micro", training.optimizer, [&](const auto& batch) {
    const at::Tensor loss = training.step(batch);
    EXPECT_LE(Bytes(training.last.peak_bytes), budget);
    EXPECT_EQ(training.last.micro_batches, 2);
    return loss;
  });
}

INSTANTIATE_TEST_SUITE_P(Models, ExportedInLessMemory, ::testing::Values("encoder"),
                         [](const auto& model) { return std::string(model.param); });

INSTANTIATE_TEST_SUITE_P(Zoo, ExportedInLessMemory, snug::testing::zoo(),
                         [](const auto& model) { return std::string(model.param); });

}  // namespace
}  // namespace snug::exported_less_memory_test
