// What is saved elsewhere is what autograd would have kept: whatever is written after the save, in other processes, in
// whole models.

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

#include "program/models/gpt.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/stepper.h"
#include "tests/support/late_writes.h"
#include "tests/support/random_model.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::offload_training_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::TemporaryFolder;
using torch::Tensor;

TEST(SaveOnHost, HasWhatOperatorsWriteAfterTheSaveAsAutogradHasIt) {
  for (const auto& model : testing::late_writes()) {
    const auto gradients = [&](bool offload, bool backward_inside) {
      torch::manual_seed(5);
      std::optional<SaveOnHost> guard;
      if (offload) {
        guard.emplace(OffloadOptions{.min_bytes = Bytes(1)});
      }
      const Tensor loss = model.loss();
      if (!backward_inside) {
        guard.reset();
      }
      return torch::autograd::grad({loss}, model.leaves);
    };
    const auto plain = gradients(false, true);
    EXPECT_TRUE(same_bits(gradients(true, true), plain)) << model.name;
    EXPECT_TRUE(same_bits(gradients(true, false), plain)) << model.name << ", after the guard";
  }
}

TEST(SaveOnHost, AForkedChildHasAFileOfItsOwn) {
  if (torch::cuda::is_available()) {
    GTEST_SKIP() << "CUDA cannot be used in a forked child, not even its generators";
  }
  const int threads = torch::get_num_threads();
  torch::set_num_threads(1);  // OpenMP's other threads are not in a child
  const Tensor w = torch::rand({64, 64}, torch::requires_grad());
  const auto with_policy = [&] {
    const auto offload = policy_of({{"aten::mm", Keep::Offload}});
    Tensor h = torch::ones({64, 64});
    for (int i = 0; i < 6; ++i) {
      h = checkpoint({.policy = offload}, [w](const Tensor& in) { return (in.mm(w) / 64).tanh(); }, h);
    }
    return torch::autograd::grad({h.sum()}, {w});
  };
  const SaveOnHost guard({.min_bytes = Bytes(1)});
  const auto with_guard = [&] {
    Tensor h = torch::ones({64, 64});
    for (int i = 0; i < 6; ++i) {
      h = (h.mm(w) / 64).tanh();
    }
    return torch::autograd::grad({h.sum()}, {w});
  };
  const auto by_policy = with_policy(), by_guard = with_guard();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // should it wait for a thread that is not there
    ::_exit(same_bits(with_policy(), by_policy) && same_bits(with_guard(), by_guard) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(same_bits(with_policy(), by_policy));
  EXPECT_TRUE(same_bits(with_guard(), by_guard));
  torch::set_num_threads(threads);
}

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
}  // namespace snug::offload_training_test
