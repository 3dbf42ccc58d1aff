// A region writes what its forward writes, once, and reads in backward what its forward read.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "program/models/resnet.h"
#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/sliced.h"
#include "tests/support/tensors.h"

namespace snug::checkpoint_effects_test {
namespace {

using testing::clones_of;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

struct Outcome {
  std::vector<Tensor> gradients, buffers;
  Tensor loss;
};

// Two steps, so that running statistics that moved too often show.
template <class Model>
Outcome two_steps(Model model, const Tensor& x, const std::function<Tensor(Model&, const Tensor&)>& forward) {
  Outcome outcome;
  for (int i = 0; i < 2; ++i) {
    outcome.loss = forward(model, x).square().mean();
    outcome.loss.backward();
  }
  outcome.gradients = gradients_of(*model);
  outcome.buffers = clones_of(model->buffers());
  return outcome;
}

TEST(CheckpointEffects, RunningStatisticsOfAResNetMoveOnceAStep) {
  const ResNetOptions options{.depth = 8, .in_channels = 1};
  torch::manual_seed(1);
  const Tensor x = torch::randn({4, 1, 16, 16});
  const auto run = [&](bool checkpointed) {
    torch::manual_seed(2);
    ResNet model(options);
    if (checkpointed) {
      model->set_block_runner([](const auto& block, Tensor h) { return checkpoint(block, std::move(h)); });
    }
    return two_steps<ResNet>(model, x, [](ResNet& m, const Tensor& in) { return m->forward(in); });
  };
  const Outcome plain = run(false), recomputed = run(true);
  EXPECT_TRUE(same_bits(recomputed.loss, plain.loss));
  EXPECT_TRUE(same_bits(recomputed.gradients, plain.gradients));
  EXPECT_TRUE(same_bits(recomputed.buffers, plain.buffers)) << "running means and variances, and batches counted";
  EXPECT_GT(plain.buffers.size(), 20u);
}

TEST(CheckpointEffects, NestedRegionsMoveRunningStatisticsOnceToo) {
  torch::manual_seed(1);
  const Tensor x = torch::randn({8, 4});
  const auto run = [&](int levels) {
    torch::manual_seed(2);
    torch::nn::Sequential model(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::ReLU(),
                                torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
    return two_steps<torch::nn::Sequential>(model, x, [levels](torch::nn::Sequential& m, const Tensor& in) {
      std::function<Tensor(const Tensor&)> call = [m](const Tensor& h) mutable { return m->forward(h); };
      for (int level = 0; level < levels; ++level) {
        call = [call](const Tensor& h) { return checkpoint(call, h); };
      }
      return call(in);
    });
  };
  const Outcome plain = run(0);
  for (int levels = 1; levels <= 3; ++levels) {
    const Outcome nested = run(levels);
    EXPECT_TRUE(same_bits(nested.gradients, plain.gradients)) << levels;
    EXPECT_TRUE(same_bits(nested.buffers, plain.buffers)) << levels;
  }
}

/// y = x * exp(count), where count is one larger each time: backward depends on what the forward wrote.
struct Counting {
  Tensor count = torch::zeros({3});
  Tensor seen = torch::zeros({3});

  Tensor operator()(const Tensor& x) const {
    count.add_(1);
    const Tensor y = (x * count.exp()).sin();
    seen.copy_(y.detach());
    return y * count.clone();
  }
};

TEST(CheckpointEffects, ABufferThatTheRegionCountsWithIsReadAsInForwardAndIsWrittenOnce) {
  const Tensor x = torch::tensor({0.1f, 0.2f, 0.3f});
  const auto gradient = [&](const Counting& region, bool checkpointed) {
    const Tensor leaf = x.clone().requires_grad_();
    const Tensor first = checkpointed ? checkpoint(region, leaf) : region(leaf);
    const Tensor second = checkpointed ? checkpoint(region, first) : region(first);
    const Tensor loss = second.sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return leaf.grad();
  };
  const Counting plain, recomputed;
  EXPECT_TRUE(same_bits(gradient(recomputed, true), gradient(plain, false)));
  EXPECT_TRUE(same_bits(recomputed.count, plain.count));
  EXPECT_TRUE(same_bits(recomputed.seen, plain.seen));
  EXPECT_EQ(plain.count[0].item<float>(), 2.0f);
}

TEST(CheckpointEffects, NestedRegionsReadTheirBuffersAsInForwardToo) {
  const Tensor x = torch::tensor({0.1f, 0.2f, 0.3f});
  const auto gradient = [&](const Counting& region, bool checkpointed) {
    const Tensor leaf = x.clone().requires_grad_();
    const auto twice = [region, checkpointed](const Tensor& h) {
      return checkpointed ? checkpoint(region, checkpoint(region, h)) : region(region(h));
    };
    (checkpointed ? checkpoint(twice, leaf) : twice(leaf)).sum().backward();
    return leaf.grad();
  };
  const Counting plain, recomputed;
  EXPECT_TRUE(same_bits(gradient(recomputed, true), gradient(plain, false)));
  EXPECT_TRUE(same_bits(recomputed.count, plain.count));
}

TEST(CheckpointEffects, LeaveTheVersionOfWhatWasWritten) {
  const Counting region;
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const Tensor loss = checkpoint(region, x).sum();
  const auto version = region.count._version();
  loss.backward();
  EXPECT_EQ(region.count._version(), version);
}

TEST(CheckpointEffects, AModuleThatGetsAnotherModeBeforeBackwardHasTheGradientOfItsForward) {
  const auto gradient = [](bool checkpointed) {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 2));
    model->eval();
    model[2]->as<torch::nn::Linear>()->train();
    const Tensor x = torch::ones({2, 4}, torch::requires_grad());
    const Tensor y = checkpointed ? checkpoint(model, x) : model->forward(x);
    const Tensor loss = y.square().sum();
    model->train();
    loss.backward();
    EXPECT_TRUE(model[1]->is_training());
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointEffects, AWriteWithAGradientToACapturedTensorIsAsInPlainTraining) {
  const auto run = [](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 3).requires_grad_();
    Tensor aux = torch::zeros({});
    const auto region = [&](const Tensor& h) {
      aux += h.exp().pow(2).mean();
      return h.sin().tanh();
    };
    const Tensor y = checkpointed ? checkpoint(region, x) : region(x);
    (y.sum() + aux.exp()).backward();
    return std::vector{x.grad(), aux.detach()};
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST(CheckpointEffects, TheDispatchStateOfTheThreadIsThatOfTheForward) {
  torch::nn::Linear layer(4, 4);
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 8).view({2, 4}).clone().requires_grad_();
    const auto f = [layer](const Tensor& h) { return at::linear(h, layer->weight, layer->bias).tanh(); };
    Tensor y;
    {
      const Autocast autocast(torch::kCPU, torch::kBFloat16);
      const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastCPU);  // so it is on, and not asked
      y = checkpointed ? checkpoint(f, x) : f(x);
    }
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    y.sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

// A sparse tensor has no storage of its own.
TEST(CheckpointEffects, AWriteToASparseTensorHappensOnceAndTheGradientIsThatOfPlainTraining) {
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const auto write_inside = [](const Tensor& h) {
    Tensor inside = torch::eye(3).to_sparse();
    inside.mul_(2.0);
    return (h * inside.to_dense()).sin();
  };
  for (const CheckpointPolicy& policy :
       {CheckpointPolicy(), CheckpointPolicy([](std::string_view) { return Keep::Save; })}) {
    const CheckpointOptions options{.policy = policy};
    Tensor outside = torch::eye(3).to_sparse();
    const auto write_outside = [&](const Tensor& h) {
      {
        const torch::NoGradGuard no_grad;
        outside.mul_(2.0);
      }
      return h.sin().exp();
    };
    const auto gradient = [&](const Tensor& y) { return torch::autograd::grad({y.sum()}, {x})[0]; };
    const Tensor of_outside = gradient(checkpoint(options, write_outside, x));
    EXPECT_TRUE(same_bits(outside.to_dense(), 2 * torch::eye(3)));
    EXPECT_TRUE(same_bits(of_outside, gradient(write_outside(x))));
    EXPECT_TRUE(same_bits(gradient(checkpoint(options, write_inside, x)), gradient(write_inside(x))));
  }
}

TEST(CheckpointEffects, AWriteToTheValuesOfASparseTensorHappensOnceToo) {
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const Tensor outside = torch::eye(3).to_sparse().coalesce();
  const auto write_and_read = [&](const Tensor& h) {
    {
      const torch::NoGradGuard no_grad;
      outside.values().mul_(2.0);
    }
    return (outside.values().clone() * h).sin();
  };
  checkpoint(write_and_read, x).sum().backward();
  EXPECT_TRUE(same_bits(x.grad(), (2 * x.detach()).cos() * 2));
}

// The storage of the tensor that is made for the write gets the address that one of the temporaries had.
TEST(CheckpointEffects, AWriteToMemoryOfTheProgramHappensOnceWhateverTemporariesWereThere) {
  std::vector<float> statistics(4, 0.0f);
  const Tensor x = torch::ones({64, 64}, torch::requires_grad());
  const auto region = [&](const Tensor& h) {
    const float mean = (h * 2).mean().item<float>();
    {
      const torch::NoGradGuard no_grad;
      torch::from_blob(statistics.data(), {4}).add_(mean);
    }
    return h.exp().sin().mul(3);
  };
  checkpoint(region, x).sum().backward();
  EXPECT_EQ(statistics, std::vector<float>(4, 2.0f));
}

TEST(CheckpointEffects, ABufferThatGrowsInTheRegionIsReadAsInForward) {
  const auto gradient = [](bool checkpointed) {
    torch::manual_seed(1);
    const Tensor table = torch::randn({1024, 4}, torch::requires_grad());
    const Tensor positions = torch::empty({0}, torch::kLong), kept = torch::zeros({2});
    for (const int64_t length : {8, 1000}) {
      const auto region = [=](const Tensor& h) {
        Tensor out = positions;
        out.resize_({h.size(0)});
        torch::arange_out(out, h.size(0));
        {
          const torch::NoGradGuard no_grad;
          kept.resize_({h.size(0)}).fill_(0.5);
        }
        return (h * kept.unsqueeze(1) + torch::embedding(table, out)).tanh();
      };
      const Tensor x = torch::randn({length, 4});
      (checkpointed ? checkpoint(region, x) : region(x)).sum().backward();
    }
    return table.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointEffects, ABufferThatHasAnotherShapeByNowIsAnErrorAsInPlainTraining) {
  const Tensor positions = torch::empty({0}, torch::kLong), table = torch::rand({16, 4}, torch::requires_grad());
  const auto region = [=](const Tensor& h) {
    Tensor out = positions;
    out.resize_({h.size(0)});
    torch::arange_out(out, h.size(0));
    return (h + torch::embedding(table, out)).tanh();
  };
  const Tensor first = checkpoint({.label = "short"}, region, torch::rand({3, 4}));
  checkpoint({.label = "long"}, region, torch::rand({9, 4}));
  EXPECT_THAT(error_of<c10::Error>([&] { first.sum().backward(); }), HasSubstr("modified by an inplace operation"));
}

// A nested tensor's rows have lengths of their own.
TEST(CheckpointEffects, OnNestedTensorsAreAsOnOthers) {
  torch::manual_seed(4);
  torch::nn::Linear layer(4, 4);
  const Tensor rows = torch::rand({5, 4}, torch::requires_grad());
  const auto nested = [](const Tensor& from) {
    return at::_nested_tensor_from_tensor_list({from.slice(0, 0, 2), from.slice(0, 2, 5)});
  };
  struct Found {
    std::vector<Tensor> gradients;
    Tensor count;
  };
  const auto run = [&](const std::optional<CheckpointOptions>& options) {
    Tensor count = nested(torch::zeros({5, 4}));
    const auto region = [&](const Tensor& h) {
      count.add_(nested(torch::ones({5, 4})));
      return at::gelu(at::linear(h, layer->weight, layer->bias)) * count.clone();
    };
    const Tensor h = nested(rows);
    const Tensor y = options ? checkpoint(*options, region, h) : region(h);
    auto gradients =
        torch::autograd::grad({y.to_padded_tensor(0.0).square().sum()}, {rows, layer->weight, layer->bias});
    return Found{std::move(gradients), count.to_padded_tensor(0.0)};
  };
  const Found plain = run(std::nullopt);
  for (const auto& options :
       {CheckpointOptions{}, CheckpointOptions{.policy = [](std::string_view) { return Keep::Save; }},
        CheckpointOptions{.policy = [](std::string_view) { return Keep::Offload; }}}) {
    const Found found = run(options);
    EXPECT_TRUE(same_bits(found.gradients, plain.gradients));
    EXPECT_TRUE(same_bits(found.count, plain.count)) << "written once";
  }
}

TEST(CheckpointEffects, ASequentialThatGetsAnotherModeBeforeBackwardHasTheGradientOfItsForward) {
  const auto gradient = [](bool checkpointed) {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 2));
    const Tensor x = torch::ones({2, 4}, torch::requires_grad());
    const Tensor y = checkpointed ? checkpoint_sequential(model, 1, x, LastSegment::Recompute) : model->forward(x);
    model->eval();
    y.square().sum().backward();
    EXPECT_FALSE(model->is_training());
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

// A queue of negatives, into which the step enqueues before it goes backward.
TEST(CheckpointReads, OfACopyAreNotDisturbedByAWriteToWhatWasCopied) {
  const Tensor w = torch::rand({4, 4}, torch::requires_grad()), x = torch::rand({2, 4});
  const auto gradient = [&](bool checkpointed) {
    const Tensor queue = torch::linspace(0, 1, 32).view({8, 4}).clone();
    const auto logits = [&](const Tensor& h) { return h.mm(w).mm(queue.narrow(0, 0, 4).clone().t()).exp(); };
    const Tensor y = checkpointed ? checkpoint(logits, x) : logits(x);
    queue.zero_();
    return torch::autograd::grad({y.sum()}, {w})[0];
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointReads, OfAParameterThatNothingSavedAreNoticedIfItIsWritten) {
  torch::nn::Linear layer(3, 3);
  const Tensor x = torch::rand({2, 3}, torch::requires_grad());
  const auto region = [&](const Tensor& h) { return layer->forward(h).relu(); };
  const Tensor loss = checkpoint({.label = "layer"}, region, x).sum();
  {
    const torch::NoGradGuard no_grad;
    layer->bias.add_(1.0);
  }
  EXPECT_THAT(error_of<Error>([&] { loss.backward(); }),
              HasSubstr("checkpoint 'layer': a parameter, buffer or input was written in place after"));
}

TEST(CheckpointReads, OfTheShapeAloneAndOfWhatBackwardDoesNotNeedLeaveMemoryFreeToBeWritten) {
  const Tensor buffer = torch::rand({3}), added_last = torch::rand({3});
  const auto region = [=](const Tensor& h) {
    const Tensor like = torch::zeros_like(buffer) + buffer.new_ones({3}) + torch::empty_like(buffer).fill_(2);
    return (h * like.view({3})).exp() + added_last;
  };
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const Tensor expected = torch::autograd::grad({region(x).sum()}, {x})[0];
  const Tensor loss = checkpoint(region, x).sum();
  buffer.add_(1);
  added_last.add_(1);
  EXPECT_TRUE(same_bits(torch::autograd::grad({loss}, {x})[0], expected));
}

// A table that a module makes in its first call, and then longer ones in its place.
TEST(CheckpointReads, OfTablesThatAModuleMakesOnceAndReplacesByOthersAreAsInForward) {
  struct Rotary {
    bool is_exact;
    Tensor table = {};
    Tensor operator()(const Tensor& h) {
      if (!table.defined() || table.size(0) < h.size(0) || (is_exact && table.size(0) != h.size(0))) {
        table = torch::arange(h.size(0)).unsqueeze(1).to(torch::kFloat).cos().contiguous();
      }
      return (h * table.narrow(0, 0, h.size(0))).sin();
    }
  };
  const auto gradients = [](bool checkpointed, bool is_exact) {
    const auto rotary = std::make_shared<Rotary>(Rotary{is_exact});
    const auto region = [rotary](const Tensor& h) { return (*rotary)(h); };
    std::vector<Tensor> inputs;
    Tensor loss = torch::zeros({});
    for (const int64_t length : {4, 4, 9, 6}) {
      inputs.push_back(torch::linspace(-1, 1, length * 2).view({length, 2}).requires_grad_());
      loss = loss + (checkpointed ? checkpoint(region, inputs.back()) : region(inputs.back())).sum();
    }
    return torch::autograd::grad({loss}, inputs);
  };
  for (const bool is_exact : {false, true}) {
    EXPECT_TRUE(same_bits(gradients(true, is_exact), gradients(false, is_exact)));
  }
}

TEST(CheckpointThreads, RegionsOnSeveralThreadsDoNotMeet) {
  // Of the input, and of a parameter that the regions capture.
  const auto gradients_of_run = [](size_t i, bool checkpointed) {
    const Tensor x = torch::full({8}, 0.1 * static_cast<double>(i + 1), torch::requires_grad());
    const Tensor weight = torch::linspace(-1, 1, 3).requires_grad_();
    const Counting region;
    const auto inner = [&](const Tensor& h) { return h.slice(0, 0, 3).sin() * weight; };
    const auto outer = [&](const Tensor& h) { return region(h * weight); };
    for (int repeat = 0; repeat < 20; ++repeat) {
      const Tensor y = checkpointed ? checkpoint(outer, checkpoint(inner, x)) : outer(inner(x));
      y.sum().backward();
    }
    return std::vector{x.grad(), weight.grad()};
  };
  std::vector<std::vector<Tensor>> found(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] { found[i] = gradients_of_run(i, true); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(same_bits(found[i], gradients_of_run(i, false))) << i;
  }
}

TEST(CheckpointThreads, BackwardMayRunOnAnotherThread) {
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const Tensor weight = torch::rand({64, 3}, torch::requires_grad());
  const Counting recomputed, plain;
  const auto with_dropout = [&](const Counting& region) {
    torch::manual_seed(1);
    return [&](const Tensor& h) { return torch::dropout(region(h) * weight, 0.5, true).exp(); };
  };
  const Tensor loss = checkpoint(with_dropout(recomputed), x).sum();
  std::thread([&] { loss.backward(); }).join();
  const auto found = gradients_of({x, weight});
  x.mutable_grad().reset();
  weight.mutable_grad().reset();
  with_dropout(plain)(x).sum().backward();
  EXPECT_TRUE(same_bits(found, gradients_of({x, weight})));
  EXPECT_TRUE(same_bits(recomputed.count, plain.count));
}

TEST(CheckpointHigherOrder, SecondAndThirdDerivativesAreEqualToTheBit) {
  const auto derivatives = [](bool checkpointed) {
    const Tensor x = torch::tensor({0.3, 0.7}, torch::dtype(torch::kDouble).requires_grad(true));
    const auto f = [](const Tensor& h) { return (h.exp() * h.sin()).tanh(); };
    Tensor y = (checkpointed ? checkpoint(f, x) : f(x)).sum();
    std::vector<Tensor> all;
    for (int order = 1; order <= 3; ++order) {
      y = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].sum();
      all.push_back(y.detach());
    }
    return all;
  };
  EXPECT_TRUE(same_bits(derivatives(true), derivatives(false)));
}

}  // namespace
}  // namespace snug::checkpoint_effects_test
