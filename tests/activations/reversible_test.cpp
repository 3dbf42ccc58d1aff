#include "snug/extra/reversible.h"

#include <cmath>
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::reversible_test {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kWidth = 16;

torch::nn::Sequential half_block(double dropout) {
  torch::nn::Sequential half(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})),
                             torch::nn::Linear(kWidth, 2 * kWidth), torch::nn::GELU(),
                             torch::nn::Linear(2 * kWidth, kWidth));
  if (dropout > 0) {
    half->push_back(torch::nn::Dropout(dropout));
  }
  return half;
}

// The same chain, reversible and as autograd stores it.
struct Both {
  std::vector<torch::nn::Sequential> halves;
  ReversibleSequential reversible;
  Tensor x;

  explicit Both(size_t depth, double dropout = 0, torch::Dtype dtype = torch::kDouble) {
    torch::manual_seed(1);
    for (size_t i = 0; i < depth; ++i) {
      halves.push_back(half_block(dropout));
      halves.push_back(half_block(dropout));
      reversible.push_back(halves[2 * i], halves[2 * i + 1]);
    }
    reversible.module()->to(dtype);
    x = torch::randn({32, 2 * kWidth}, dtype).requires_grad_();
  }

  Tensor stored() {
    const auto parts = x.chunk(2, -1);
    Tensor a = parts[0], b = parts[1];
    for (size_t i = 0; i < halves.size(); i += 2) {
      a = a + halves[i]->forward(b);
      b = b + halves[i + 1]->forward(a);
    }
    return torch::cat({a, b}, -1);
  }
  Tensor rebuilt() const { return reversible.forward(x); }

  // Input first.
  std::vector<Tensor> gradients(const std::function<Tensor()>& forward, uint64_t seed = 3) const {
    torch::manual_seed(seed);
    const Tensor y = forward();
    y.square().sum().backward();
    return take_gradients();
  }
  std::vector<Tensor> take_gradients() const {
    auto all = reversible.module()->parameters();
    all.insert(all.begin(), x);
    auto gradients = gradients_of(all);
    for (auto& each : all) {
      each.mutable_grad().reset();
    }
    return gradients;
  }
};

::testing::AssertionResult close(const std::vector<Tensor>& a, const std::vector<Tensor>& b, double bound) {
  for (size_t i = 0; i < b.size(); ++i) {
    if (auto result = close_in_norm(a[i], b[i], bound); !result) {
      return ::testing::AssertionFailure() << "tensor " << i << ": " << result.message();
    }
  }
  return ::testing::AssertionSuccess();
}

// Each of the 2n subtractions leaves an error of at most u = epsilon / 2 of the streams' size, here at most 4 times
// that of what goes into the normalisations, and each half-block behind it passes errors on with a factor of at most 1
// + L, L = 0.5 being a generous Lipschitz constant of torch's initial weights after normalisation. Gradients add the
// factor 2 n of the layers that read rebuilt values.
double bound_for(size_t depth, double epsilon) {
  const auto halves = 2.0 * static_cast<double>(depth);
  return halves * halves * 4 * (epsilon / 2) * std::pow(1.5, halves);
}

TEST(ReversibleSequential, HasTheOutputsOfTheStoredChainToTheBitAndItsGradientsUpToRounding) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    Both model(4, 0, dtype);
    EXPECT_TRUE(same_bits(model.rebuilt(), model.stored()));
    const double epsilon = dtype == torch::kDouble ? 0x1p-52 : 0x1p-23;
    EXPECT_TRUE(close(model.gradients([&] { return model.rebuilt(); }), model.gradients([&] { return model.stored(); }),
                      bound_for(4, epsilon)));
  }
}

TEST(ReversibleSequential, RepeatsTheDropoutOfEachHalfBlock) {
  Both model(3, 0.4);
  const auto rebuilt = model.gradients([&] { return model.rebuilt(); });
  const auto next = torch::rand(2);
  const auto stored = model.gradients([&] { return model.stored(); });
  EXPECT_TRUE(close(rebuilt, stored, bound_for(3, 0x1p-52)));
  EXPECT_TRUE(torch::equal(torch::rand(2), next)) << "the generator goes on as after a plain forward";
}

TEST(ReversibleSequential, RecomputesUnderTheAutocastOfTheForward) {
  Both model(3, 0, torch::kFloat);
  const auto under_autocast = [](const std::function<Tensor()>& forward) {
    return [forward] {
      const Autocast autocast(torch::kCPU, torch::kBFloat16);
      return forward();
    };
  };
  const auto stored = model.gradients(under_autocast([&] { return model.stored(); }));
  // A rebuilt value next to a rounding boundary of BF16 may fall to its other side.
  EXPECT_TRUE(
      close(model.gradients(under_autocast([&] { return model.rebuilt(); })), stored, bound_for(3, 0x1p-23) + 0x1p-9));
}

TEST(ReversibleSequential, GoesBackwardTwiceThroughARetainedGraph) {
  Both model(3, 0.2);
  torch::manual_seed(3);
  const Tensor loss = model.rebuilt().square().sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto first = model.take_gradients();
  loss.backward();
  EXPECT_TRUE(same_bits(model.take_gradients(), first));
}

TEST(ReversibleSequential, GoesPartOfTheWayBackAndStartsAgain) {
  Both model(3);
  const Tensor loss = model.rebuilt().square().sum();
  const auto gradient = [&](size_t half) {
    return torch::autograd::grad({loss}, {model.halves[half]->parameters()[2]}, {}, /*retain_graph=*/true)[0];
  };
  const auto last = gradient(5), middle = gradient(2);
  EXPECT_TRUE(same_bits(gradient(5), last));
  EXPECT_TRUE(same_bits(gradient(5), last));
  EXPECT_TRUE(same_bits(gradient(2), middle));
  loss.backward();
  const auto all = model.take_gradients();
  EXPECT_TRUE(close(all, model.gradients([&] { return model.stored(); }), bound_for(3, 0x1p-52)));
}

TEST(ReversibleSequential, AnswersAutogradGradAndGradientsOfGradients) {
  Both model(2);
  const auto penalty = [&](const Tensor& y) {
    const auto gradient = torch::autograd::grad({y.square().sum()}, {model.x}, {}, true, /*create_graph=*/true)[0];
    gradient.square().sum().backward();
    return model.take_gradients();
  };
  EXPECT_TRUE(close(penalty(model.rebuilt()), penalty(model.stored()), bound_for(4, 0x1p-52)));
}

TEST(ReversibleSequential, WorksInsideACheckpointAndAroundOne) {
  Both model(3, 0.2);
  const auto stored = model.gradients([&] { return model.stored(); });
  const auto inside = model.gradients(
      [&] { return checkpoint([&](const Tensor& t) { return model.reversible.forward(t); }, model.x); });
  EXPECT_TRUE(close(inside, stored, bound_for(3, 0x1p-52)));
  ReversibleSequential around;
  for (size_t i = 0; i < model.halves.size(); i += 2) {
    const auto recomputed = [&](size_t k) {
      return [half = model.halves[k]](const Tensor& t) {
        return checkpoint([half](const Tensor& u) mutable { return half->forward(u); }, t);
      };
    };
    around.push_back(recomputed(i), recomputed(i + 1));
  }
  EXPECT_TRUE(close(model.gradients([&] { return around.forward(model.x); }), stored, bound_for(3, 0x1p-52)));
}

TEST(ReversibleSequential, RebuildsThroughHalfBlocksThatSaveNothing) {
  Both model(2);
  const auto twice = [](const Tensor& t) { return 2 * t; };
  ReversibleSequential chain;
  chain.push_back(model.halves[0], twice).push_back(twice, model.halves[1]).push_back(twice, twice);
  const auto rebuilt = model.gradients([&] { return chain.forward(model.x); });
  const auto stored = model.gradients([&] {
    const auto parts = model.x.chunk(2, -1);
    Tensor a = parts[0] + model.halves[0]->forward(parts[1]);
    Tensor b = parts[1] + 2 * a;
    a = a + 2 * b;
    b = b + model.halves[1]->forward(a);
    a = a + 2 * b;
    return torch::cat({a, b + 2 * a}, -1);
  });
  // The streams grow to 50 times their size before they are taken back.
  EXPECT_TRUE(
      close({rebuilt.begin(), rebuilt.begin() + 9}, {stored.begin(), stored.begin() + 9}, 50 * bound_for(3, 0x1p-52)));
}

// Half-blocks that save nothing run again for the streams alone.
TEST(ReversibleSequential, WritesBuffersOnceAlsoWhereBackwardSkipsAHalfBlock) {
  Both model(2);
  Tensor calls = torch::zeros({});
  torch::nn::Sequential twice(torch::nn::Functional([calls](const Tensor& t) {
    calls.add_(1);
    return 2 * t;
  }));
  ReversibleSequential chain;
  chain.push_back(model.halves[0], twice).push_back(twice, model.halves[1]);
  chain.forward(model.x).sum().backward();
  EXPECT_EQ(calls.item<double>(), 2) << "the forward's";
}

TEST(ReversibleSequential, LetsAHalfBlockTakeAGradientInsideItsForward) {
  Both model(2);
  // f(t) = d/dt of sum(tanh(layer(t))), which needs what the layer saved before the forward is complete.
  const auto slope = [&](size_t k) {
    return [half = model.halves[k]](const Tensor& t) mutable {
      return torch::autograd::grad({torch::tanh(half->forward(t)).sum()}, {t}, {}, true, /*create_graph=*/true)[0];
    };
  };
  ReversibleSequential chain;
  chain.push_back(slope(0), slope(1)).push_back(slope(2), slope(3));
  const auto rebuilt = model.gradients([&] { return chain.forward(model.x); });
  const auto stored = model.gradients([&] {
    const auto parts = model.x.chunk(2, -1);
    Tensor a = parts[0], b = parts[1];
    for (size_t i = 0; i < 4; i += 2) {
      a = a + slope(i)(b);
      b = b + slope(i + 1)(a);
    }
    return torch::cat({a, b}, -1);
  });
  EXPECT_TRUE(
      close({rebuilt.begin(), rebuilt.begin() + 1}, {stored.begin(), stored.begin() + 1}, bound_for(4, 0x1p-52)));
}

TEST(ReversibleSequential, TakesTwoStreamsAndOtherDimensions) {
  Both model(2);
  const auto conv = [] { return torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 2, 3).padding(1)); };
  ReversibleSequential pictures(/*dim=*/1);
  pictures.push_back(conv(), conv());
  EXPECT_EQ(pictures.forward(torch::rand({2, 4, 5, 5})).sizes(), (std::vector<int64_t>{2, 4, 5, 5}));
  const auto parts = model.x.chunk(2, -1);
  const auto [a, b] = model.reversible.forward(parts[0], parts[1]);
  EXPECT_TRUE(same_bits(torch::cat({a, b}, -1), model.stored()));
  const auto streams = model.gradients([&] {
    const auto halves = model.x.chunk(2, -1);
    const auto [c, d] = model.reversible.forward(halves[0], halves[1]);
    return torch::cat({c, d}, -1);
  });
  EXPECT_TRUE(same_bits(streams, model.gradients([&] { return model.rebuilt(); })));
}

TEST(ReversibleSequential, RegistersItsModulesByBlock) {
  ReversibleSequential chain;
  chain.push_back(torch::nn::Linear(2, 2), [](const Tensor& t) { return t; });
  chain.push_back(torch::nn::ReLU(), torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
  EXPECT_THAT(chain.module()->named_parameters().keys(), ElementsAre("0.f.weight", "0.f.bias", "1.g.weight"));
}

struct Peaks {
  int64_t after_forward;
  int64_t peak;
};

Peaks memory_of(size_t depth, bool reversible) {
  Both model(depth, 0, torch::kFloat);
  const Tensor x = torch::randn({512, 2 * kWidth});
  const auto step = [&](const MemoryMeter* meter) {
    model.x = x.detach();  // data
    const Tensor y = reversible ? model.rebuilt() : model.stored();
    const int64_t live = meter == nullptr ? 0 : meter->report().live_bytes;
    y.sum().backward();
    return live;
  };
  step(nullptr);  // now the gradients are there
  const MemoryMeter meter;
  const int64_t live = step(&meter);
  return {live, meter.report().peak_bytes};
}

TEST(ReversibleSequential, NeedsTheSameMemoryAtAnyDepth) {
  const auto four = memory_of(4, true), sixteen = memory_of(16, true), stored = memory_of(16, false);
  EXPECT_EQ(four.after_forward, 512 * 2 * kWidth * 4) << "the output alone";
  EXPECT_EQ(sixteen.after_forward, four.after_forward);
  EXPECT_EQ(sixteen.peak, four.peak);
  EXPECT_GT(stored.peak, 5 * sixteen.peak);
}

TEST(ReversibleSequential, LeavesNothingBehindWhenTheGraphIsGone) {
  Both model(3);
  model.gradients([&] { return model.rebuilt(); });
  const MemoryMeter meter;
  for (int i = 0; i < 3; ++i) {
    model.rebuilt();
    model.reversible.forward(model.x.narrow(1, 0, kWidth), model.x.narrow(1, kWidth, kWidth));
    model.gradients([&] { return model.rebuilt(); });
  }
  EXPECT_EQ(meter.report().live_bytes, 0);
}

TEST(ReversibleSequential, GivesUpTheStreamsAtTheEndOfBackwardThoughTheGraphIsRetained) {
  Both model(3, 0, torch::kFloat);
  model.gradients([&] { return model.rebuilt(); });
  const MemoryMeter meter;
  const Tensor loss = model.rebuilt().sum();
  const int64_t before = meter.report().live_bytes;
  loss.backward({}, /*retain_graph=*/true);
  model.take_gradients();
  EXPECT_EQ(meter.report().live_bytes, before);
}

TEST(ReversibleSequential, NoticesThatItsOutputWasWrittenTo) {
  Both model(2);
  Tensor y = model.rebuilt();
  const Tensor loss = y.sum();
  y.mul_(2);
  EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(ReversibleSequential, MovesRunningStatisticsOnceAStep) {
  const auto buffers = [](bool reversible) {
    torch::manual_seed(1);
    torch::nn::Sequential f(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4)), g(torch::nn::Linear(4, 4));
    const Tensor x = torch::randn({8, 8}, torch::requires_grad());
    if (reversible) {
      ReversibleSequential chain;
      chain.push_back(f, g);
      chain.forward(x).sum().backward();
    } else {
      const auto parts = x.chunk(2, -1);
      const Tensor a = parts[0] + f->forward(parts[1]);
      torch::cat({a, parts[1] + g->forward(a)}, -1).sum().backward();
    }
    return clones_of(f->buffers());
  };
  EXPECT_TRUE(same_bits(buffers(true), buffers(false)));
}

// The first half-block saves nothing, and keeps a value without a gradient.
TEST(ReversibleSequential, GoesBackwardTwiceThroughAHalfBlockThatSavesNothing) {
  const auto run = [](bool reversible) {
    const Tensor x = torch::linspace(-1, 1, 16).view({2, 8}).requires_grad_();
    const auto f = [](const Tensor& h) { return h + (h.detach() * 2).tanh(); };
    const auto g = [](const Tensor& h) { return h.sin(); };
    Tensor y;
    if (reversible) {
      ReversibleSequential chain;
      chain.push_back(g, f).push_back(f, g);
      y = chain.forward(x);
    } else {
      const auto parts = x.chunk(2, -1);
      Tensor a = parts[0] + g(parts[1]), b = parts[1] + f(a);
      a = a + f(b);
      y = torch::cat({a, b + g(a)}, -1);
    }
    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(close({run(true)}, {run(false)}, 1e-5));
}

TEST(ReversibleSequential, AHalfBlockMayReadAllOfTheInputToo) {
  const Tensor x = torch::linspace(-1, 1, 16).view({2, 8}).requires_grad_();
  const auto gradient = [&](const Tensor& y) { return torch::autograd::grad({y.sum()}, {x})[0]; };
  const auto f = [&](const Tensor& h) { return h.sin() * x.narrow(-1, 0, 4).exp(); };
  const auto g = [](const Tensor& h) { return h.cos(); };
  ReversibleSequential chain;
  chain.push_back(f, g);
  const auto parts = x.chunk(2, -1);
  const Tensor a = parts[0] + f(parts[1]);
  EXPECT_TRUE(close({gradient(chain.forward(x))}, {gradient(torch::cat({a, parts[1] + g(a)}, -1))}, 1e-5));
}

TEST(ReversibleSequential, RefusesWhatCannotBeReversed) {
  ReversibleSequential chain;
  const auto x = torch::rand({3, 4});
  EXPECT_THAT(error_of<ConfigError>([&] { chain.forward(x); }), HasSubstr("there are no blocks"));
  chain.push_back(torch::nn::Linear(2, 2), [](const Tensor& t) { return t.sum(-1, /*keepdim=*/true); });
  EXPECT_THAT(error_of<ConfigError>([&] { chain.forward(x); }), HasSubstr("G of block 0 made [3, 1] of [3, 2]"));
  EXPECT_THAT(error_of<ConfigError>([&] { chain.forward(torch::rand({3, 5})); }), HasSubstr("[3, 5] cannot be halved"));
  EXPECT_THAT(error_of<ConfigError>([&] { chain.forward(torch::rand({2, 2}), torch::rand({2, 3})); }),
              HasSubstr("give two of one shape"));
  ReversibleSequential writing;
  writing.push_back([](Tensor t) { return t.relu_().exp(); }, torch::nn::Linear(2, 2));
  EXPECT_THAT(error_of<ConfigError>([&] { writing.forward(torch::rand({3, 4}, torch::requires_grad())); }),
              HasSubstr("F of block 0 writes its input in place"));
}

}  // namespace
}  // namespace snug::reversible_test
