#include "snug/clip.h"
#include "tests/step/ranked_training.h"

// Parameters that are frozen and unfrozen between steps; all compositions of that are in composition_test.cpp and
// composition_on_ranks_test.cpp.

namespace snug::freezing_test {
namespace {

using torch::Tensor;

TEST(StepperFreezing, CountsWhatIsFrozenAfterAStepInNoNormAndDropsItsGradient) {
  Training run;
  run.step(tiny_batch(4));
  const Tensor frozen = run.model->parameters().front();
  frozen.set_requires_grad(false);
  const Tensor before = frozen.detach().clone();
  const auto result = run.step(tiny_batch(4));
  EXPECT_TRUE(same_bits(frozen, before));
  EXPECT_FALSE(frozen.grad().defined());
  EXPECT_EQ(result.grad_norm(), grad_norm(run.model->parameters()).item<double>());
  for (const Tensor& parameter : run.model->parameters()) {
    EXPECT_EQ(parameter.grad().defined(), !parameter.is_same(frozen));
  }
}

// Its gradient would be that of a part of the step.
TEST(StepperFreezing, RefusesFreezingAndUnfreezingInsideAWindow) {
  for (const bool is_frozen_first : {false, true}) {
    Training run(nullptr, {.accumulate = {.every = 2}});
    const auto add = [&] {
      return run.stepper->accumulate(tiny_batch(4), [&](const Batch& micro) { return run.loss_of(micro); });
    };
    const Tensor first = run.model->parameters().front();
    const auto before = clones_of(run.model->parameters());
    first.set_requires_grad(!is_frozen_first);
    add();
    first.set_requires_grad(is_frozen_first);
    EXPECT_THAT(error_of<ConfigError>(add),
                HasSubstr(is_frozen_first ? "'0.weight' was unfrozen" : "'0.weight' was frozen"));
    EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), before));
    add();
    EXPECT_TRUE(add()->stepped()) << "the window was dropped";
  }
}

}  // namespace
}  // namespace snug::freezing_test
