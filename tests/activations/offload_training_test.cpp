// Whole models train with what is saved elsewhere.

#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "snug/activations/checkpoint.h"
#include "snug/activations/offload.h"
#include "snug/activations/policy.h"
#include "snug/core/error.h"
#include "snug/memory/limit.h"
#include "snug/memory/meter.h"
#include "snug/models/gpt.h"
#include "snug/train/stepper.h"
#include "tests/support/late_writes.h"
#include "tests/support/random_model.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::TemporaryFolder;
using torch::Tensor;

TEST(SaveOnHost, GivesRandomModelsTheSameLossesAndGradients) {
  for (uint64_t seed = 0; seed < testing::random_model_kinds().size(); ++seed) {
    const auto train = [&](bool offload) {
      const testing::RandomModel model = testing::random_model(seed);
      std::vector<Tensor> found;
      for (int step = 0; step < 2; ++step) {
        std::optional<SaveOnHost> guard;
        if (offload) {
          guard.emplace(OffloadOptions{.min_bytes = Bytes(1)});
        }
        const Tensor loss = model.loss(model.input);
        if (step == 0) {
          guard.reset();
        }
        loss.backward();
        found.push_back(loss.detach());
      }
      const auto gradients = gradients_of(model.leaves());
      found.insert(found.end(), gradients.begin(), gradients.end());
      return found;
    };
    EXPECT_TRUE(same_bits(train(true), train(false))) << testing::random_model(seed).description;
  }
}

TEST(SaveOnHost, AModelThreeTimesAsLargeAsTheLimitTrainsUnderIt) {
  const TemporaryFolder folder;
  const auto losses = [&](bool recompute, bool offload, Bytes limit) {
    Blocks model(40, folder.path());
    torch::optim::SGD optimizer(model.parameters, torch::optim::SGDOptions(0.1));
    const MemoryLimit cap(torch::kCPU,
                          limit.is_unlimited() ? limit : Bytes(live_bytes(torch::kCPU).count() + limit.count()));
    std::vector<Tensor> seen;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      std::optional<SaveOnHost> guard;
      if (offload) {
        guard.emplace(model.options);
      }
      const Tensor loss = model.loss(recompute);
      loss.backward();
      optimizer.step();
      seen.push_back(loss.detach());
    }
    return seen;
  };
  const Blocks model(40, folder.path());
  const int64_t saved = 40 * Blocks::kSavedInABlock * Blocks::kActivation;
  const Bytes limit(saved / 3);
  ASSERT_GT(limit.count(), testing::bytes_of(model.parameters));
  const auto expected = losses(false, false, Bytes::unlimited());
  EXPECT_THROW(losses(false, false, limit), c10::OutOfMemoryError);
  EXPECT_TRUE(same_bits(losses(true, false, limit), expected));
  EXPECT_TRUE(same_bits(losses(false, true, limit), expected));
  EXPECT_TRUE(same_bits(losses(true, true, limit), expected));
  // Together they need less than recomputation alone, which keeps 40 inputs. Offload alone needs no more than the two, which hold a
  // recomputed block, but moves four times the bytes (see TakesTheInputsOfCheckpointedRegions).
  const Bytes smaller(30 * Blocks::kActivation + testing::bytes_of(model.parameters));
  ASSERT_LT(smaller, limit);
  EXPECT_THROW(losses(true, false, smaller), c10::OutOfMemoryError);
  EXPECT_TRUE(same_bits(losses(true, true, smaller), expected));
}

TEST(SaveOnHost, AStepWithMixedPrecisionMicroBatchesAndDropoutIsTheSame) {
  const auto trained = [](bool recompute, bool offload) {
    torch::manual_seed(4);
    Gpt model(GptOptions{.vocab = 32, .context = 16, .layers = 2, .heads = 2, .width = 32, .dropout = 0.1});
    model->set_block_runner(
        [&](const auto& block, const Tensor& h) { return recompute ? checkpoint(block, h) : block(h); });
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    Stepper stepper(model, optimizer, {.precision = Precision::BFloat16, .micro_batch = 3});
    const Batch batch{torch::randint(32, {8, 16}), torch::randint(32, {8, 16})};
    for (int step = 0; step < 2; ++step) {
      std::optional<SaveOnHost> guard;
      if (offload) {
        guard.emplace(OffloadOptions{.min_bytes = Bytes(1)});
      }
      stepper.step(batch, [&](const Batch& micro) {
        const Tensor logits = model->forward(micro[0]).to(torch::kFloat).flatten(0, 1);
        return Loss::sum(
            torch::nn::functional::cross_entropy(
                logits, micro[1].flatten(), torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
            micro[1].numel());
      });
      if (guard) {
        EXPECT_GT(guard->report().bytes_out, 0);
        EXPECT_LE(guard->report().bytes_back, guard->report().bytes_out) << "something was read twice";
      }
    }
    return testing::clones_of(model->parameters());
  };
  const auto plain = trained(false, false);
  EXPECT_TRUE(same_bits(trained(false, true), plain));
  EXPECT_TRUE(same_bits(trained(true, true), plain));
}

}  // namespace
}  // namespace snug
