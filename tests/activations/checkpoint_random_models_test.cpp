// Random models as checkpointed regions, in every way there is: nothing differs from plain training.

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::checkpoint_random_models_test {
namespace {

using testing::clones_of;
using testing::gradients_of;
using testing::random_model;
using testing::RandomModel;
using testing::same_bits;
using torch::Tensor;
using Loss = std::function<Tensor(Tensor)>;

struct Way {
  std::string name;
  std::function<Tensor(const Loss&, const Tensor&)> run;
};

Way with(std::string name, const CheckpointOptions& options) {
  return {std::move(name), [options](const Loss& loss, const Tensor& x) { return checkpoint(options, loss, x); }};
}

const std::vector<Way>& ways() {
  static const std::vector<Way> all{with("checkpoint", {}),
                                    with("save_matmuls", {.policy = save_matmuls}),
                                    with("recompute_pointwise", {.policy = recompute_pointwise}),
                                    with("save all", {.policy = [](std::string_view) { return Keep::Save; }}),
                                    with("offload all", {.policy = [](std::string_view) { return Keep::Offload; }}),
                                    {"nested", [](const Loss& loss, const Tensor& x) {
                                       return checkpoint([loss](const Tensor& in) { return checkpoint(loss, in); }, x);
                                     }}};
  return all;
}

// Two steps of one model, with what a module remembers of the first.
std::vector<Tensor> two_steps(uint64_t seed, const Way* way) {
  const RandomModel model = random_model(seed);
  std::vector<Tensor> seen;
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(static_cast<uint64_t>(step));
    const Tensor loss = way == nullptr ? model.loss(model.input) : way->run(model.loss, model.input);
    loss.backward();
    seen.push_back(loss.detach());
    seen.push_back(torch::rand({4}));  // where the generator is
  }
  for (const auto& more : {gradients_of(model.leaves()), clones_of(model.module->buffers())}) {
    seen.insert(seen.end(), more.begin(), more.end());
  }
  return seen;
}

TEST(CheckpointOfRandomModels, GivesLossesGradientsBuffersAndTheGeneratorEqualToTheBit) {
  for (uint64_t seed = 0; seed < testing::random_model_kinds().size(); ++seed) {
    const std::vector<Tensor> expected = two_steps(seed, nullptr);
    for (const Way& way : ways()) {
      SCOPED_TRACE(random_model(seed).description + "; " + way.name);
      ASSERT_TRUE(same_bits(two_steps(seed, &way), expected));
    }
  }
}

}  // namespace
}  // namespace snug::checkpoint_random_models_test
