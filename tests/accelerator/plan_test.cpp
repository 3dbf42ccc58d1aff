// Plans on an accelerator: random models under five budgets.

#include <algorithm>
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

// Some of the models make tensors of their own on the CPU, and the simulated device has no views of conjugates.
bool runs_on_device(const RandomModel& model) {
  if (std::ranges::find(model.kinds, "conjugates") != model.kinds.end()) {
    return false;
  }
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
    // Such a function gets a copy of a tensor that a plan holds, which takes a time that is not predicted.
    const bool unpacks_itself = std::ranges::find(model.kinds, "custom_function") != model.kinds.end();
    Step step(model);
    double began = virtual_seconds();
    int64_t read = host_reads();
    const testing::Outcome plain = step.run(std::nullopt);
    const double plain_seconds = virtual_seconds() - began;
    const int64_t plain_reads = host_reads() - read;
    step.reset();
    const StepProfile profile = profile_step(step.forward());
    const int64_t plain_peak = ActivationPlan(profile, Bytes::unlimited(), testing::kSearch).plain_peak_bytes;
    EXPECT_EQ(plain_peak, plain.peak_bytes);
    const int64_t floor = testing::smallest_feasible(profile).count();
    for (const int64_t budget : {plain_peak, floor + (plain_peak - floor) * 3 / 4, floor + (plain_peak - floor) / 2,
                                 floor + (plain_peak - floor) / 4, floor}) {
      SCOPED_TRACE(budget);
      const ActivationPlan plan(profile, Bytes(budget), testing::kSearch);
      began = virtual_seconds();
      read = host_reads();
      const testing::Outcome planned = step.run(plan);
      const double more = virtual_seconds() - began - plain_seconds;
      if (!unpacks_itself) {
        EXPECT_EQ(more, plan.predicted_seconds - plan.plain_seconds);
      }
      EXPECT_EQ(host_reads() - read, plain_reads) << "the plan reads nothing";
      testing::expect_same(planned, plain);
      EXPECT_EQ(planned.peak_bytes, plan.predicted_peak_bytes);
      EXPECT_LE(planned.peak_bytes, budget);
      replayed += planned.replayed > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(ran, 20);
  EXPECT_GT(replayed, 20);
}

}  // namespace
}  // namespace snug::accelerator_plan_test
