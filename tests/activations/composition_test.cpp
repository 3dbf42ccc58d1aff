// Every technique for activations alone and with every other, on an MLP, a GPT, a recurrent net and a ResNet with
// dropout and BatchNorm, in FP32 and under BF16 autocast: losses, gradients, buffers and the generator afterwards equal
// plain training to the bit, each block is called once, and fewer bytes are held for backward.

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/models/gpt.h"
#include "program/models/resnet.h"
#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/sliced.h"
#include "tests/support/tensors.h"

namespace snug::composition_test {
namespace {

using testing::clones_of;
using testing::gradients_of;
using testing::same_bits;
using torch::Tensor;
using Layer = std::function<Tensor(Tensor)>;

/// How blocks run: one at a time, by what checkpoint() and its kin make of it.
struct Recomputation {
  std::string name;
  BlockRunner run;
  bool keeps_results = false;  // more than plain training does, where these are small
};

/// What is done with tensors that are saved, around the whole forward.
struct Keeping {
  std::string name;
  std::function<std::shared_ptr<void>()> begin;
  bool frees = false;  // by itself: less is held for backward
};

const std::vector<Recomputation>& recomputations() {
  static const std::vector<Recomputation> all{
      {"Plain", [](const Layer& block, Tensor x) { return block(std::move(x)); }},
      {"Checkpoint", [](const Layer& block, Tensor x) { return checkpoint(block, std::move(x)); }},
      {"Nested",
       [](const Layer& block, Tensor x) {
         return checkpoint([block](Tensor h) { return checkpoint(block, std::move(h)); }, std::move(x));
       }},
      {"SaveMatmuls",
       [](const Layer& block, Tensor x) { return checkpoint({.policy = save_matmuls}, block, std::move(x)); },
       /*keeps_results=*/true},
      {"RecomputePointwise",
       [](const Layer& block, Tensor x) { return checkpoint({.policy = recompute_pointwise}, block, std::move(x)); },
       /*keeps_results=*/true},
      {"Segment",
       [](const Layer& block, Tensor x) {
         return checkpoint_sequential(std::vector<Layer>{block}, 1, std::move(x), LastSegment::Recompute);
       }},
  };
  return all;
}

const std::vector<Keeping>& keepings() {
  static const std::vector<Keeping> all{
      {"Keep", [] { return std::shared_ptr<void>(); }},
      {"Offload", [] { return std::make_shared<SaveOnHost>(OffloadOptions{.min_bytes = Bytes(1024)}); },
       /*frees=*/true},
      {"Hooks",
       [] {
         return std::make_shared<SavedTensorHooks>([](const Tensor& t) { return std::any(t.clone()); },
                                                   [](std::any& kept) { return std::any_cast<Tensor&>(kept); });
       }},
  };
  return all;
}

struct Net {
  std::vector<Tensor> parameters, buffers;
  std::function<Tensor(const BlockRunner&)> loss;
  size_t blocks = 0;
};

Net mlp() {
  struct Blocks : torch::nn::Module {
    std::vector<torch::nn::Sequential> parts;
  };
  auto model = std::make_shared<Blocks>();
  for (int i = 0; i < 3; ++i) {
    model->parts.emplace_back(torch::nn::Linear(24, 48), torch::nn::BatchNorm1d(48),
                              torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true)), torch::nn::Dropout(0.3),
                              torch::nn::Linear(48, 24));
    model->register_module(std::to_string(i), model->parts.back());
  }
  const Tensor x = torch::randn({32, 24});
  return {model->parameters(), model->buffers(),
          [model, x](const BlockRunner& run) {
            Tensor h = x;
            for (auto part : model->parts) {
              h = run([part](Tensor t) mutable { return part->forward(std::move(t)); }, h);
            }
            return h.square().mean();
          },
          3};
}

Net gpt() {
  Gpt model(GptOptions{.vocab = 32, .context = 16, .layers = 3, .heads = 2, .width = 32, .dropout = 0.2});
  const Tensor tokens = torch::randint(32, {2, 16});
  return {model->parameters(), model->buffers(),
          [model, tokens](const BlockRunner& run) mutable {
            model->set_block_runner(run);
            return torch::nn::functional::cross_entropy(model->forward(tokens).flatten(0, 1), tokens.flatten());
          },
          3};
}

Net resnet() {
  ResNet model(ResNetOptions{.depth = 8, .widths = {4, 8, 8}, .in_channels = 1, .dropout = 0.2});
  const Tensor x = torch::randn({4, 1, 20, 20});
  return {model->parameters(), model->buffers(),
          [model, x](const BlockRunner& run) mutable {
            model->set_block_runner(run);
            return torch::nn::functional::cross_entropy(model->forward(x), torch::arange(4));
          },
          model->blocks.size()};
}

Net recurrent() {
  struct Blocks : torch::nn::Module {
    std::vector<torch::nn::GRU> parts;
    torch::nn::LSTMCell last{24, 24};
  };
  auto model = std::make_shared<Blocks>();
  for (int i = 0; i < 3; ++i) {
    model->parts.push_back(model->register_module(std::to_string(i), torch::nn::GRU(24, 24)));
  }
  model->register_module("last", model->last);
  const Tensor x = torch::randn({5, 16, 24});
  return {model->parameters(), model->buffers(),
          [model, x](const BlockRunner& run) {
            Tensor h = x;
            for (auto part : model->parts) {
              h = run([part](Tensor t) mutable { return std::get<0>(part->forward(t)) + t; }, h);
            }
            return std::get<0>(model->last->forward(h[4])).square().mean();
          },
          3};
}

struct Outcome {
  std::vector<Tensor> losses, gradients, buffers;
  Tensor generator;
  double calls = 0;
  int64_t held = 0;  // bytes between forward and backward
};

Outcome train(const std::function<Net()>& make, const Recomputation& how, const Keeping& keeping, bool bf16) {
  torch::manual_seed(3);
  Net net = make();
  Outcome outcome;
  const BlockRunner counting = [&](const Layer& block, Tensor x) {
    return how.run(
        [block, &outcome](Tensor h) {
          outcome.calls += 1;
          return block(std::move(h));
        },
        std::move(x));
  };
  for (int step = 0; step < 2; ++step) {
    const MemoryMeter meter;
    Tensor loss;
    {
      const auto scope = keeping.begin();
      std::optional<Autocast> autocast;
      if (bf16) {
        autocast.emplace(torch::kCPU, torch::kBFloat16);
      }
      loss = net.loss(counting);
    }
    outcome.held = meter.report().live_bytes;
    loss.backward();
    outcome.losses.push_back(loss.detach());
  }
  outcome.gradients = gradients_of(net.parameters);
  outcome.buffers = clones_of(net.buffers);
  outcome.generator = at::detail::getDefaultCPUGenerator().get_state();
  outcome.calls /= 2.0 * static_cast<double>(net.blocks);
  return outcome;
}

using Cell = std::tuple<size_t, size_t, bool>;  // recomputation, keeping, BF16

class ActivationComposition : public ::testing::TestWithParam<Cell> {
 protected:
  void compare(const std::function<Net()>& make) const {
    const auto& [how_index, keeping_index, bf16] = GetParam();
    const Recomputation& how = recomputations()[how_index];
    const Keeping& keeping = keepings()[keeping_index];
    const Outcome plain = train(make, recomputations()[0], keepings()[0], bf16);
    const Outcome found = train(make, how, keeping, bf16);
    EXPECT_TRUE(same_bits(found.losses, plain.losses));
    EXPECT_TRUE(same_bits(found.buffers, plain.buffers));
    EXPECT_TRUE(same_bits(found.generator, plain.generator));
    EXPECT_EQ(found.calls, 1) << "a block, in a step";
    EXPECT_TRUE(same_bits(found.gradients, plain.gradients));
    if (how_index == 0 ? keeping.frees : !how.keeps_results) {
      EXPECT_LT(found.held, plain.held);
    }
  }
};

TEST_P(ActivationComposition, KeepsTheResultsOfAnMlpWithBatchNormAndDropout) { compare(mlp); }
TEST_P(ActivationComposition, KeepsTheResultsOfAGptWithDropout) { compare(gpt); }
TEST_P(ActivationComposition, KeepsTheResultsOfAResNet) { compare(resnet); }
TEST_P(ActivationComposition, KeepsTheResultsOfARecurrentNet) { compare(recurrent); }

std::string name_of(const ::testing::TestParamInfo<Cell>& info) {
  const auto& [how, keeping, bf16] = info.param;
  return recomputations()[how].name + keepings()[keeping].name + (bf16 ? "Autocast" : "");
}

INSTANTIATE_TEST_SUITE_P(, ActivationComposition,
                         ::testing::Combine(::testing::Range(size_t{0}, recomputations().size()),
                                            ::testing::Range(size_t{0}, keepings().size()), ::testing::Bool()),
                         name_of);

}  // namespace
}  // namespace snug::composition_test
