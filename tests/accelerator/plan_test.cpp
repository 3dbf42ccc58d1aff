// Plans on an accelerator: random models under five budgets.

#include "snug/plan.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/stepper.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/model_on_device.h"
#include "tests/support/move_to.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::accelerator_plan_test {
namespace {

using sim_device::host_reads;
using sim_device::virtual_seconds;
using testing::accelerator;
using testing::model_on_device;
using testing::number_of_models;
using testing::RandomModel;
using testing::repeats_itself;
using testing::runs_on_device;
using testing::Step;
using testing::unpacks_itself;
using torch::Tensor;

TEST(PlansOnAnAccelerator, GiveRandomModelsTheirBitsThePredictedPeakAndThePredictedTime) {
  const testing::KernelsThatRepeatThemselves kernels;
  int ran = 0, replayed = 0;
  for (uint64_t seed = 0; seed < number_of_models(); ++seed) {
    const RandomModel model = model_on_device(seed);
    SCOPED_TRACE(model.description);
    if (!runs_on_device(model)) {
      continue;
    }
    Step step(model);
    if (!repeats_itself(step)) {
      continue;
    }
    ++ran;
    double began = virtual_seconds();
    int64_t read = host_reads();
    const testing::Outcome plain = step.run(std::nullopt);
    const double plain_seconds = virtual_seconds() - began;
    const int64_t plain_reads = host_reads() - read;
    step.reset();
    const plan::Profile profile = detail::profile_step(step.forward());
    const int64_t plain_peak = detail::unverified_plan(profile, Bytes::unlimited(), testing::kSearch).plain_peak_bytes;
    if (sim_device::is_present()) {
      EXPECT_EQ(plain_peak, plain.peak_bytes);
    }
    const int64_t floor = testing::smallest_feasible(profile).count();
    for (const int64_t budget : {plain_peak, floor + (plain_peak - floor) * 3 / 4, floor + (plain_peak - floor) / 2,
                                 floor + (plain_peak - floor) / 4, floor}) {
      SCOPED_TRACE(budget);
      const ActivationPlan plan = detail::unverified_plan(profile, Bytes(budget), testing::kSearch);
      testing::take_workspaces_of_backward(step, plan);
      began = virtual_seconds();
      read = host_reads();
      const testing::Outcome planned = step.run(plan);
      const double more = virtual_seconds() - began - plain_seconds;
      if (sim_device::is_present() && !unpacks_itself(model)) {
        EXPECT_EQ(more, plan.predicted_seconds - plan.plain_seconds);
      }
      EXPECT_EQ(host_reads() - read, plain_reads) << "the plan reads nothing";
      testing::expect_same(planned, plain);
      testing::expect_peak(planned.peak_bytes, plan.predicted_peak_bytes);
      EXPECT_LE(planned.peak_bytes, budget);
      replayed += planned.replayed > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(ran, 20);
  EXPECT_GT(replayed, 20);
}

// They are there for good: memory of the whole step, and of no activation.
TEST(PlansOnAnAccelerator, KnowOfWorkspacesThatLibrariesHaveNotTakenYet) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const auto predicted = [] {
    auto model = testing::tiny_model();
    testing::move_to(*model, accelerator());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Stepper stepper(
        model, optimizer,
        {.micro_batch = 8, .budget = {.memory = Bytes(live_bytes(accelerator()).count() + (int64_t{64} << 20))}});
    const auto loss = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
    const StepResult result = stepper.step(testing::tiny_batch(8), loss);
    EXPECT_EQ(result.step_downs, 0);
    return stepper.plan()->choice.peak_bytes;
  };
  const int64_t without = predicted();
  const sim_device::ProductWorkspaces workspaces;
  EXPECT_EQ(predicted() - without, sim_device::kWorkspaceBytes);
}

TEST(PlansOnAnAccelerator, ProfileWithinWhatTheStepTakesWithoutWorkspaces) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const Tensor x = torch::ones({64, 64}, accelerator()), w = torch::ones({64, 64}, accelerator()).requires_grad_();
  int calls = 0;
  const auto forward = [&] {
    ++calls;
    return x.mm(w).sin().sum();
  };
  const int64_t plain = detail::unverified_plan(detail::profile_step(forward), Bytes::unlimited()).plain_peak_bytes;
  const int calls_before = std::exchange(calls, 0);
  const sim_device::ProductWorkspaces workspaces;
  EXPECT_EQ(
      detail::unverified_plan(detail::profile_step(forward, {.memory = Bytes(plain)}), Bytes(plain)).plain_peak_bytes,
      plain);
  EXPECT_EQ(calls, calls_before) << "no run had to be made in another way";
}

}  // namespace
}  // namespace snug::accelerator_plan_test
