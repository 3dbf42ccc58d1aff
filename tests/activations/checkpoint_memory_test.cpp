#include <chrono>
#include <functional>
#include <string_view>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "tests/support/tensors.h"

namespace snug::checkpoint_memory_test {
namespace {

using testing::same_bits;
using torch::Tensor;

// Four blocks of Linear, GELU, Linear, GELU on 256 rows of width 64. All activations have the same number of bytes. A
// block saves four: its input, what goes into each GELU, and what goes into its second Linear.
struct Blocks {
  static constexpr int64_t kRows = 256, kWidth = 64, kBlocks = 4;
  static constexpr int64_t kActivation = kRows * kWidth * 4;
  static constexpr int64_t kSavedInABlock = 4;

  std::vector<torch::nn::Sequential> blocks;
  Tensor x = torch::rand({kRows, kWidth});

  Blocks() {
    for (int64_t i = 0; i < kBlocks; ++i) {
      blocks.emplace_back(torch::nn::Linear(kWidth, kWidth), torch::nn::GELU(), torch::nn::Linear(kWidth, kWidth),
                          torch::nn::GELU());
    }
  }

  Tensor loss(const std::function<Tensor(torch::nn::Sequential, const Tensor&)>& run) const {
    Tensor h = x;
    for (const auto& block : blocks) {
      h = run(block, h);
    }
    return h.sum();
  }
  Tensor plain_loss() const {
    return loss([](torch::nn::Sequential block, const Tensor& h) { return block->forward(h); });
  }
  Tensor checkpointed_loss(const CheckpointOptions& options = {}) const {
    return loss([&](torch::nn::Sequential block, const Tensor& h) { return checkpoint(options, block, h); });
  }
  int64_t gradient_bytes() const {
    int64_t bytes = 0;
    for (const auto& block : blocks) {
      bytes += testing::bytes_of(block->parameters());
    }
    return bytes;
  }
};

TEST(CheckpointMemory, AfterForwardOnlyTheInputsOfRegionsAreLeft) {
  const Blocks model;
  {
    const MemoryMeter meter;
    const Tensor loss = model.plain_loss();
    EXPECT_EQ(meter.report().live_bytes, (Blocks::kBlocks * Blocks::kSavedInABlock - 1) * Blocks::kActivation + 4)
        << "all but the first block's input, which was there before; and the loss";
  }
  {
    const MemoryMeter meter;
    const Tensor loss = model.checkpointed_loss();
    EXPECT_EQ(meter.report().live_bytes, (Blocks::kBlocks - 1) * Blocks::kActivation + 4);
  }
  {
    const MemoryMeter meter;
    const Tensor y = checkpoint([](const Tensor& t) { return torch::dropout(t, 0.5, true).sin().sum(); },
                                model.x.detach().requires_grad_());
    EXPECT_EQ(meter.report().live_bytes, 4) << "neither the mask of dropout nor its generator is kept in a tensor";
  }
}

// Plain: at the start of backward everything saved is there. Checkpointed: when the last block has been recomputed, the
// inputs of the blocks and what one block saves (its input is among the former) are.
TEST(CheckpointMemory, TheActivationPeakFallsFromAllBlocksToTheInputsAndOneBlock) {
  const Blocks model;
  const auto peak_of = [](const Tensor& loss, const MemoryMeter& meter) {
    loss.backward();
    return meter.report();
  };
  MemoryMeter::Report plain, checkpointed;
  {
    const MemoryMeter meter;
    plain = peak_of(model.plain_loss(), meter);
  }
  for (const auto& block : model.blocks) {
    for (auto& parameter : block->parameters()) {
      parameter.mutable_grad().reset();
    }
  }
  {
    const MemoryMeter meter;
    checkpointed = peak_of(model.checkpointed_loss(), meter);
  }
  const int64_t all = Blocks::kBlocks * Blocks::kSavedInABlock - 1;
  const int64_t inputs_and_a_block = Blocks::kBlocks - 1 + Blocks::kSavedInABlock - 1;
  EXPECT_EQ(plain.activations, all * Blocks::kActivation);
  EXPECT_EQ(checkpointed.activations, inputs_and_a_block * Blocks::kActivation);
  EXPECT_EQ(plain.live_bytes, model.gradient_bytes() + 4);
  EXPECT_EQ(checkpointed.live_bytes, model.gradient_bytes() + 4);
  EXPECT_LT(checkpointed.peak_bytes, plain.peak_bytes / 2);
}

TEST(CheckpointMemory, NestedRegionsKeepLess) {
  const Blocks model;
  const auto all_in_one = [&](const Tensor& x) {
    Tensor h = x;
    for (auto block : model.blocks) {
      h = checkpoint(block, h);
    }
    return h;
  };
  const MemoryMeter meter;
  const Tensor loss = checkpoint(all_in_one, model.x).sum();
  EXPECT_EQ(meter.report().live_bytes, 4) << "the inner regions' inputs are dropped too; x was there before";
  loss.backward();
  EXPECT_EQ(meter.report().live_bytes, model.gradient_bytes() + 4);
}

TEST(CheckpointMemory, ARetainedGraphKeepsNoRecomputedTensorsAndTheLastPassKeepsNothing) {
  for (const CheckpointOptions& options : {CheckpointOptions(), CheckpointOptions{.policy = save_matmuls}}) {
    const Blocks model;
    const MemoryMeter meter;
    const Tensor loss = model.checkpointed_loss(options);
    const int64_t after_forward = meter.report().live_bytes;
    for (int i = 0; i < 3; ++i) {
      loss.backward({}, /*retain_graph=*/true);
      EXPECT_EQ(meter.report().live_bytes, after_forward + model.gradient_bytes());
    }
    loss.backward();
    EXPECT_EQ(meter.report().live_bytes, model.gradient_bytes() + 4);
  }
}

TEST(CheckpointMemory, InsideSaveOnHostARegionHoldsNoInput) {
  const auto run = [](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 4096).requires_grad_();
    const auto body = [](const Tensor& h) { return h.exp().sin().sum(); };
    const MemoryMeter meter;
    Tensor loss;
    {
      const SaveOnHost host({.min_bytes = Bytes(1024)});
      const Tensor input = x + 1;
      loss = checkpointed ? checkpoint(body, input) : body(input);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (meter.report().live_bytes > 4 && std::chrono::steady_clock::now() < end) {  // a transfer is under way
      std::this_thread::yield();
    }
    EXPECT_EQ(meter.report().live_bytes, 4);
    loss.backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST(CheckpointMemory, ValuesThatBackwardDoesNotNeedAreNotHeld) {
  constexpr int64_t kItems = 4096, kBytes = kItems * 4;
  const Tensor x = torch::rand({kItems}).requires_grad_();
  const CheckpointOptions saves_all{.policy = [](std::string_view) { return Keep::Save; }};
  {
    const auto body = [](const Tensor& h, const Tensor& other) { return (h + other).neg().sin().sum(); };
    const MemoryMeter meter;
    const Tensor loss = checkpoint(saves_all, body, x, torch::rand({kItems}));
    EXPECT_EQ(meter.report().live_bytes, kBytes + 4) << "what goes into the sine";
  }
  {
    const auto body = [](const Tensor& h) { return (h.sin() + torch::ones({kItems}).mul_(2)).sum(); };
    const MemoryMeter meter;
    const Tensor loss = checkpoint(body, x);
    EXPECT_EQ(meter.report().live_bytes, 4) << "a value without a gradient, of which only the sum was needed";
  }
}

// A backward of a part of the graph takes a part of what was recomputed. The rest must not pile up.
TEST(CheckpointMemory, ManyGradientsOfPartsOfARetainedGraphDoNotPileUp) {
  const Blocks model;
  const MemoryMeter meter;
  const Tensor loss = model.checkpointed_loss();
  const auto last_weight = model.blocks.back()->parameters()[2];
  int64_t after_first = 0;
  for (int i = 0; i < 5; ++i) {
    const auto gradient = torch::autograd::grad({loss}, {last_weight}, {}, /*retain_graph=*/true);
    if (i == 0) {
      after_first = meter.report().live_bytes;
    }
    EXPECT_EQ(meter.report().live_bytes, after_first);
  }
}

TEST(CheckpointMemory, AFailedBackwardKeepsNothingOnceTheGraphIsGone) {
  const int64_t before = live_bytes(torch::kCPU).count();
  {
    const Tensor x = torch::rand({1000}, torch::requires_grad()), weight = torch::rand({1000});
    const Tensor loss = checkpoint([&](const Tensor& t) { return (t * weight).exp().sin().exp(); }, x).sum();
    weight.add_(1);
    EXPECT_THROW(loss.backward(), Error);
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
}

class WeightAsGradient : public torch::autograd::Function<WeightAsGradient> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({weight});
    return (x * weight).sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list) {
    return {context->get_saved_variables()[0], {}};
  }
};

// Autograd makes a gradient of it, to which it adds later ones.
TEST(CheckpointMemory, ASavedTensorThatBecomesAGradientIsNotTheModelsOwnMemory) {
  const Tensor weight = torch::full({8}, 3.0);
  const auto twice = [&](bool checkpointed) {
    const Tensor x = torch::ones({8}, torch::requires_grad());
    const auto f = [weight](const Tensor& h) { return WeightAsGradient::apply(h, weight); };
    for (int i = 0; i < 2; ++i) {
      (checkpointed ? checkpoint(f, x) : f(x)).backward();
    }
    EXPECT_TRUE(same_bits(x.grad(), torch::full({8}, 6.0)));
    EXPECT_TRUE(same_bits(weight, torch::full({8}, 3.0)));
  };
  twice(false);
  twice(true);
  const SaveOnHost offload;
  twice(false);
}

TEST(CheckpointMemory, AGraphThatIsDroppedWithoutBackwardReleasesTheRegion) {
  const int64_t before = live_bytes(torch::kCPU).count();
  {
    const Tensor x = torch::rand({1000}, torch::requires_grad());
    const Tensor y = checkpoint(
        [](const Tensor& t) { return checkpoint([](const Tensor& u) { return u.exp().exp(); }, t.sin()).cos(); }, x);
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
}

// Saves its own output, as LibTorch's tanh does, by a function that users write.
struct SquashImpl : torch::autograd::Function<SquashImpl> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const Tensor y = x.tanh();
    context->save_for_backward({y});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const Tensor y = context->get_saved_variables()[0];
    return {gradients[0] * (1 - y * y)};
  }
};

TEST(CheckpointMemory, OfACustomFunctionThatSavesItsOutputIsGivenBack) {
  const Tensor x = torch::rand({64, 64}).requires_grad_(), w = torch::rand({64, 64}).requires_grad_();
  const auto run = [&] {
    x.mutable_grad() = torch::zeros_like(x);
    w.mutable_grad() = torch::zeros_like(w);
    const auto fn = [](const Tensor& h, const Tensor& weight) { return SquashImpl::apply(h.mm(weight)); };
    checkpoint(fn, x, w).sum().backward();
  };
  run();
  const int64_t before = live_bytes(torch::kCPU).count();
  const Tensor gradient = x.grad();
  run();
  EXPECT_TRUE(same_bits(x.grad(), gradient));
  EXPECT_EQ(live_bytes(torch::kCPU).count() - before, static_cast<int64_t>(gradient.nbytes()));
}

// As a module that remembers its attention weights does.
TEST(CheckpointMemory, AResultThatTheCallableStoresDoesNotHoldTheRegion) {
  constexpr int64_t kBytes = 64 * 64 * 4;
  const Tensor w = torch::rand({64, 64}).requires_grad_();
  w.mutable_grad() = torch::zeros_like(w);
  Tensor last;
  const auto block = [&](const Tensor& h) {
    last = h.mm(w).tanh().sigmoid();
    return last.exp().sin();
  };
  const MemoryMeter meter;
  checkpoint(block, torch::rand({64, 64})).sum().backward();
  EXPECT_EQ(meter.report().live_bytes, kBytes) << "the result itself";
}

TEST(CheckpointMemory, ALongChainOfRegionsIsDroppedOnASmallStack) {
  const Tensor v = torch::rand({2, 2}).requires_grad_();
  const auto cell = [v](const Tensor& h) { return torch::tanh(h.mm(v * v)); };  // v * v keeps its region longest
  Tensor h = torch::rand({2, 2});
  for (int step = 0; step < 4000; ++step) {
    h = checkpoint(cell, h);
  }
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, size_t{256} * 1024);
  pthread_t thread;
  const auto drop = [](void* tensor) -> void* {
    static_cast<Tensor*>(tensor)->reset();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &small, drop, &h), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&small);
  EXPECT_FALSE(h.defined());
}

}  // namespace
}  // namespace snug::checkpoint_memory_test
