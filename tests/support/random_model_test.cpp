// The random models that other tests are made of: the same for the same seed, sound, and of every kind.

#include "tests/support/random_model.h"

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/memory.h"
#include "tests/support/tensors.h"

namespace snug::random_model_test {
namespace {

using testing::clones_of;
using testing::gradients_of;
using testing::random_model;
using testing::RandomModel;
using testing::same_bits;
using torch::Tensor;

struct Outcome {
  std::vector<Tensor> parameters, gradients, buffers;
};

Outcome train_once(uint64_t seed) {
  const RandomModel model = random_model(seed);
  const std::vector<Tensor> parameters = clones_of(model.module->parameters());
  model.loss(model.input).backward();
  return {parameters, gradients_of(model.leaves()), clones_of(model.module->buffers())};
}

TEST(RandomModel, IsTheSameForTheSameSeedAndSoAreItsGradientsAndBuffers) {
  for (uint64_t seed = 0; seed < testing::random_model_kinds().size(); ++seed) {
    SCOPED_TRACE(random_model(seed).description);
    const Outcome a = train_once(seed);
    const Outcome b = train_once(seed);
    ASSERT_TRUE(same_bits(a.parameters, b.parameters));
    ASSERT_TRUE(same_bits(a.gradients, b.gradients));
    ASSERT_TRUE(same_bits(a.buffers, b.buffers));
  }
}

TEST(RandomModel, GivesEveryLeafAFiniteGradientAndFewThatAreZero) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    const Tensor loss = model.loss(model.input);
    ASSERT_EQ(loss.dim(), 0);
    loss.backward();
    int64_t silent = 0;
    for (const Tensor& leaf : model.leaves()) {
      ASSERT_TRUE(leaf.grad().defined());
      ASSERT_TRUE(leaf.grad().isfinite().all().item<bool>());
      silent += leaf.grad().any().item<bool>() ? 0 : 1;
    }
    EXPECT_LE(2 * silent, std::ssize(model.leaves()));  // a bias before a normalisation has none
  }
}

TEST(RandomModel, HasEveryKindOfBlockWithinAsManySeedsAndTokensFrozenWeightsAndInputsThatWantGradients) {
  std::vector<std::string> kinds;
  bool tokens = false, frozen = false, wanted = false;
  for (uint64_t seed = 0; seed < testing::random_model_kinds().size(); ++seed) {
    const RandomModel model = random_model(seed);
    kinds.insert(kinds.end(), model.kinds.begin(), model.kinds.end());
    tokens = tokens || !model.input.is_floating_point();
    wanted = wanted || model.input.requires_grad();
    frozen = frozen || !model.module->parameters()[0].requires_grad();
  }
  EXPECT_THAT(kinds, ::testing::IsSupersetOf(testing::random_model_kinds()));
  EXPECT_TRUE(tokens && frozen && wanted);
}

TEST(RandomModel, NeedsBetweenATenthAndFiveMegabytes) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const RandomModel model = random_model(seed);
    SCOPED_TRACE(model.description);
    MemoryMeter meter;
    meter.attach(*model.module);
    model.loss(model.input).backward();
    const MemoryMeter::Report report = meter.report();
    EXPECT_GT(report.peak_bytes, 100'000);
    EXPECT_LT(report.peak_bytes, 5'000'000);
  }
}

}  // namespace
}  // namespace snug::random_model_test
