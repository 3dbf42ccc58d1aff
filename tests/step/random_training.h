#pragma once
// Random models that train under a Stepper, in budgets between the least and plain training's peak.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/stepper.h"
#include "src/memory/cpu_allocator.h"
#include "tests/step/planned_training.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::testing::random_training {

/// While it lives, tensors of so many bytes and more leave memory.
class InFileFrom {
 public:
  explicit InFileFrom(size_t bytes) : before_(detail::set_in_file_from(bytes)) {}
  ~InFileFrom() { detail::set_in_file_from(before_); }
  InFileFrom(const InFileFrom&) = delete;
  InFileFrom& operator=(const InFileFrom&) = delete;

 private:
  size_t before_;
};

struct Trained {
  std::string bits;
  int64_t peak = 0;
  std::optional<StepPlan> plan;
};

inline Trained train(const RandomModel& model, int steps, StepperOptions with) {
  torch::manual_seed(1);
  std::vector<torch::Tensor> trained = model.leaves();
  std::erase_if(trained, [&](const torch::Tensor& leaf) { return leaf.is_same(model.input); });
  AdamW optimizer(trained, {.lr = 0.01});
  with.micro_batch = model.input.size(0);
  const torch::Tensor input = model.input.detach();
  Stepper stepper(*model.module, optimizer, with);
  Trained result;
  for (int step = 0; step < steps; ++step) {
    const StepResult made =
        stepper.step({input}, [&](const Batch& micro) { return Loss::whole(model.loss(micro[0])); });
    result.peak = std::max(result.peak, made.peak_bytes);
    result.plan = stepper.plan();
  }
  result.bits = bits_of(clones_of(model.module->parameters())) + bits_of(clones_of(model.module->buffers()));
  return result;
}

/// How many of five trainings have the model in `place`, in budgets from the least on. `make`: none for a seed that
/// cannot train there. On a CPU the budgets go up to plain training's peak. A step is tried under a plan that is made
/// before the bytes of its backward pass are known, from measured times, so the least budget differs from run to run.
/// On a device the budgets go up by the bytes of the weights, and the least, by virtual times, is the same in each run.
inline int expect_the_bits_in_five_budgets(const std::function<std::optional<RandomModel>(uint64_t)>& make, int steps,
                                           c10::Device device, const std::filesystem::path& offload, Place place) {
  const OneThread scratch_of_several_threads_overlaps_by_chance;
  const InFileFrom small(2048);
  const auto within = [&](uint64_t seed, int64_t budget) {
    return train(*make(seed), steps, {.budget = {.memory = Bytes(budget), .offload = offload}});
  };
  const auto told = [&](uint64_t seed) {
    for (int64_t little = 64 << 10;; little *= 2) {
      const int64_t budget = planned::live(device) + little;
      try {
        within(seed, budget);
        return budget;
      } catch (const BudgetExceeded& error) {
        if (error.smallest_feasible().count() > 0) {  // none: so much is alive before there is a step
          return error.smallest_feasible().count();
        }
      }
    }
  };
  int in_place = 0;
  const uint64_t every = std::getenv("SNUG_RANDOM_MODELS") != nullptr ? 1 : 6;  // of those that there are
  for (uint64_t seed = 0; seed < number_of_models(); seed += every) {
    const std::optional<RandomModel> model = make(seed);
    if (!model) {
      continue;
    }
    SCOPED_TRACE(model->description);
    const Trained plain = train(*model, steps, {});
    const int64_t least = device.is_cpu() ? told(seed) * 9 / 8 : told(seed);
    const int64_t most = device.is_cpu() ? plain.peak : least + bytes_of(model->module->parameters());
    for (int k = 0; k < 5; ++k) {
      const int64_t budget = least + std::max<int64_t>(0, most - least) * k / 4;
      SCOPED_TRACE(budget);
      const Trained planned = within(seed, budget);
      EXPECT_TRUE(planned.bits == plain.bits);
      EXPECT_LE(planned.peak, budget);
      EXPECT_LE(planned.peak, planned.plan->choice.peak_bytes + planned.plan->spare_bytes);
      in_place += planned.plan->placement.model == place ? 1 : 0;
    }
  }
  return in_place;
}

}  // namespace snug::testing::random_training
