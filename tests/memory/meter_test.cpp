#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/memory.h"
#include "tests/support/tensors.h"

namespace snug::meter_test {
namespace {

using testing::bytes_of;
using torch::Tensor;

int64_t live() { return live_bytes(torch::kCPU).count(); }

int64_t sum_of_categories(const MemoryMeter::Report& r) {
  return r.parameters + r.gradients + r.optimizer_state + r.activations + r.workspace + r.outputs + r.before;
}

// A tensor so large that the peak is now, with all that is alive.
void make_the_peak_here(const MemoryMeter& meter) { torch::empty({meter.report().peak_bytes + 1}, torch::kUInt8); }

TEST(MemoryMeter, AnExpressionWithOneTemporaryTakesOneTensorOfWorkspace) {
  constexpr int64_t kBytes = 1000 * 4;
  const Tensor a = torch::rand({1000});
  const Tensor b = torch::rand({1000});
  const Tensor c = torch::rand({1000});
  const MemoryMeter meter;
  const Tensor d = a + b / c;
  const auto report = meter.report();
  EXPECT_EQ(report.workspace, kBytes);
  EXPECT_EQ(report.outputs, kBytes);
  EXPECT_EQ(report.live_bytes, kBytes);
  EXPECT_EQ(report.peak_bytes, 2 * kBytes);
  EXPECT_EQ(report.activations, 0);
  EXPECT_EQ(report.parameters + report.gradients + report.optimizer_state, 0);
}

// Autograd takes a gradient that nobody else holds for its own, and adds to it.
struct Dot : torch::autograd::Function<Dot> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& a, const Tensor& b) {
    context->save_for_backward({a, b});
    return (a * b).sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    const auto saved = context->get_saved_variables();
    return {saved[1], saved[0]};
  }
};

TEST(MemoryMeter, DoesNotMakeAParameterTheGradientOfAnother) {
  const Tensor a = torch::full({100}, 2.0f).requires_grad_(), b = torch::full({100}, 3.0f).requires_grad_();
  const MemoryMeter meter;
  for (int pass = 1; pass <= 2; ++pass) {
    Dot::apply(a, b).backward();
    EXPECT_TRUE(torch::equal(a.grad(), torch::full({100}, 3.0f * static_cast<float>(pass))));
    EXPECT_TRUE(torch::equal(b.detach(), torch::full({100}, 3.0f)));
  }
}

TEST(MemoryMeter, WithGradientsOnTheSameExpressionKeepsTheOperandsAndTheQuotientIsStillWorkspace) {
  const auto with_gradient = torch::requires_grad();
  const Tensor a = torch::rand({1000}, with_gradient);
  const Tensor b = torch::rand({1000}, with_gradient);
  const Tensor c = torch::rand({1000}, with_gradient);
  const MemoryMeter meter;
  const Tensor d = a + b / c;  // the division saves b and c, which were there before; the sum saves nothing
  const auto report = meter.report();
  EXPECT_EQ(report.workspace, 4000);
  EXPECT_EQ(report.activations, 0);
  EXPECT_EQ(report.live_bytes, 4000);
}

TEST(MemoryMeter, WhatWasThereBeforeAndIsNotAttachedIsBefore) {
  const Tensor old = torch::rand({250});
  const int64_t level = live();
  const MemoryMeter meter;
  const Tensor young = torch::rand({100});
  const auto report = meter.report();
  EXPECT_EQ(report.before, level);
  EXPECT_EQ(report.outputs, 400);
  EXPECT_EQ(sum_of_categories(report), level + report.peak_bytes);
}

TEST(MemoryMeter, ReleasingWhatWasThereBeforeLowersTheLevelBelowTheStart) {
  Tensor old = torch::rand({250});
  const int64_t level = live();
  const MemoryMeter meter;
  old.reset();
  const Tensor young = torch::rand({100});
  const auto report = meter.report();
  EXPECT_EQ(report.live_bytes, 400 - 1000);
  EXPECT_EQ(report.peak_bytes, 0);
  EXPECT_EQ(report.before, level) << "the worst moment was the start";
  EXPECT_EQ(report.outputs, 0);
}

// Three layers of width 64 on 256 rows. ReLU saves its result, and the next Linear the same tensor: one for each layer.
// What goes into ReLU is saved by nobody; the input of the first Linear was there before.
struct Chain {
  static constexpr int64_t kRows = 256, kWidth = 64, kLayers = 3;
  static constexpr int64_t kActivation = kRows * kWidth * 4;

  torch::nn::Sequential model;
  Tensor x = torch::rand({kRows, kWidth});

  Chain() {
    for (int64_t i = 0; i < kLayers; ++i) {
      model->push_back(torch::nn::Linear(kWidth, kWidth));
      model->push_back(torch::nn::ReLU());
    }
  }
  int64_t parameter_bytes() const { return bytes_of(model->parameters()); }
};

TEST(MemoryMeter, ActivationsOfAnMlpAreWhatOneCountsByHand) {
  Chain chain;
  const int64_t level = live();
  MemoryMeter meter;
  meter.attach(*chain.model);
  const Tensor loss = chain.model->forward(chain.x).sum();
  const auto report = meter.report();
  EXPECT_EQ(report.activations, Chain::kLayers * Chain::kActivation);
  EXPECT_EQ(report.workspace, Chain::kActivation) << "what goes into the last ReLU";
  EXPECT_EQ(report.outputs, 0) << "the loss is younger than the peak";
  EXPECT_EQ(report.peak_bytes, (Chain::kLayers + 1) * Chain::kActivation);
  EXPECT_EQ(report.live_bytes, Chain::kLayers * Chain::kActivation + 4);
  EXPECT_EQ(report.parameters, chain.parameter_bytes());
  EXPECT_EQ(report.before, level - chain.parameter_bytes());
}

// At the peak, the last Linear goes backward: of its incoming gradient and its outgoing one each a tensor, the
// gradients of its weight and bias, and what the other layers saved.
TEST(MemoryMeter, ThePeakOfForwardAndBackwardIsWhatOneCountsByHand) {
  Chain chain;
  MemoryMeter meter;
  meter.attach(*chain.model);
  const Tensor loss = chain.model->forward(chain.x).sum();
  loss.backward();
  const auto report = meter.report();
  const int64_t gradients_of_a_layer = chain.parameter_bytes() / Chain::kLayers;
  EXPECT_EQ(report.activations, (Chain::kLayers - 1) * Chain::kActivation);
  EXPECT_EQ(report.gradients, gradients_of_a_layer);
  EXPECT_EQ(report.workspace, 2 * Chain::kActivation + 4) << "two gradients of activations, and that of the loss";
  EXPECT_EQ(report.outputs, 4) << "the loss";
  EXPECT_EQ(report.peak_bytes, (Chain::kLayers + 1) * Chain::kActivation + gradients_of_a_layer + 8);
  EXPECT_EQ(report.live_bytes, chain.parameter_bytes() + 4) << "nothing but gradients and the loss is left";
}

TEST(MemoryMeter, CategoriesAddUpToTheLevelAtTheStartAndThePeak) {
  for (const bool model_is_older : {true, false}) {
    auto chain = std::make_unique<Chain>();
    if (!model_is_older) {
      chain.reset();
    }
    const int64_t level = live();
    MemoryMeter meter;
    if (!chain) {
      chain = std::make_unique<Chain>();
    }
    meter.attach(*chain->model);
    AdamW optimizer(chain->model->parameters());
    meter.attach(optimizer);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      chain->model->forward(chain->x).sum().backward();
      optimizer.step();
      const auto report = meter.report();
      EXPECT_EQ(sum_of_categories(report), level + report.peak_bytes) << step;
      for (const int64_t bytes : {report.parameters, report.gradients, report.optimizer_state, report.activations,
                                  report.workspace, report.outputs, report.before}) {
        EXPECT_GE(bytes, 0);
      }
    }
  }
}

TEST(MemoryMeter, GradientsAreCountedWhetherTheyAreOlderThanTheMeterOrNot) {
  Chain chain;
  const auto gradients = [&](MemoryMeter& meter) {
    meter.attach(*chain.model);
    chain.model->forward(chain.x).sum().backward();
    make_the_peak_here(meter);
    return meter.report().gradients;
  };
  MemoryMeter first;
  EXPECT_EQ(gradients(first), chain.parameter_bytes());
  MemoryMeter second;
  EXPECT_EQ(gradients(second), chain.parameter_bytes());
}

TEST(MemoryMeter, BuffersOfAModuleAreCountedAsItsParameters) {
  MemoryMeter meter;
  const auto norm = torch::nn::BatchNorm1d(100);  // weight, bias, two running statistics, and an int64
  meter.attach(*norm);
  make_the_peak_here(meter);
  EXPECT_EQ(meter.report().parameters, 4 * 400 + 8);
}

struct Tied : torch::nn::Module {
  Tied() { register_parameter("head", register_parameter("embedding", torch::zeros({10, 20}))); }
};

TEST(MemoryMeter, ATiedParameterAndAModuleThatIsAttachedTwiceAreCountedOnce) {
  const Tied model;
  MemoryMeter meter;
  meter.attach(model);
  meter.attach(model);
  EXPECT_EQ(meter.report().parameters, 10 * 20 * 4);
}

// Bytes of optimizer state after a step, at a peak after it.
int64_t state_bytes(const std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>& make) {
  Chain chain;
  const auto optimizer = make(chain.model->parameters());
  MemoryMeter meter;
  meter.attach(*chain.model);
  meter.attach(*optimizer);
  chain.model->forward(chain.x).sum().backward();
  optimizer->step();
  make_the_peak_here(meter);
  const auto report = meter.report();
  EXPECT_EQ(report.gradients, chain.parameter_bytes());
  EXPECT_EQ(report.live_bytes, report.gradients + report.optimizer_state) << "nothing else may be left";
  return report.optimizer_state;
}

TEST(MemoryMeter, MomentumAndMomentsAreOptimizerState) {
  using namespace torch::optim;
  const int64_t p = Chain().parameter_bytes();
  const int64_t tensors = 2 * Chain::kLayers;
  const auto with = [](auto make) {
    return state_bytes(
        [make](std::vector<Tensor> parameters) -> std::unique_ptr<Optimizer> { return make(std::move(parameters)); });
  };
  EXPECT_EQ(with([](auto ps) { return std::make_unique<torch::optim::SGD>(ps, SGDOptions(0.1)); }), 0);
  EXPECT_EQ(with([](auto ps) { return std::make_unique<torch::optim::SGD>(ps, SGDOptions(0.1).momentum(0.9)); }), p);
  EXPECT_EQ(with([](auto ps) { return std::make_unique<torch::optim::Adam>(ps); }), 2 * p);
  EXPECT_EQ(with([](auto ps) { return std::make_unique<torch::optim::AdamW>(ps); }), 2 * p);
  EXPECT_EQ(with([](auto ps) {
              return std::make_unique<torch::optim::AdamW>(ps, torch::optim::AdamWOptions().amsgrad(true));
            }),
            3 * p);
  EXPECT_EQ(with([](auto ps) { return std::make_unique<RMSprop>(ps, RMSpropOptions().momentum(0.9).centered(true)); }),
            3 * p);
  EXPECT_EQ(with([](auto ps) { return std::make_unique<snug::AdamW>(ps); }), 2 * p + 4 * tensors)
      << "a step count each";
}

TEST(MemoryMeter, OptimizerStateThatIsOlderThanTheMeterIsCountedToo) {
  Chain chain;
  AdamW optimizer(chain.model->parameters());
  chain.model->forward(chain.x).sum().backward();
  optimizer.step();
  const int64_t level = live();
  MemoryMeter meter;
  meter.attach(*chain.model);
  meter.attach(optimizer);
  const auto report = meter.report();
  EXPECT_EQ(report.optimizer_state, 2 * chain.parameter_bytes() + 4 * 2 * Chain::kLayers);
  EXPECT_EQ(report.gradients, chain.parameter_bytes());
  EXPECT_EQ(report.parameters, chain.parameter_bytes());
  EXPECT_EQ(report.peak_bytes, 0);
  EXPECT_EQ(sum_of_categories(report), level);
}

TEST(MemoryMeter, SeveralCountAtOnceEachFromItsOwnStart) {
  const MemoryMeter first;
  const Tensor a = torch::empty({1000}, torch::kUInt8);
  auto second = std::make_unique<MemoryMeter>();
  Tensor b = torch::empty({300}, torch::kUInt8);
  b.reset();
  EXPECT_EQ(first.report().live_bytes, 1000);
  EXPECT_EQ(first.report().peak_bytes, 1300);
  EXPECT_EQ(second->report().live_bytes, 0);
  EXPECT_EQ(second->report().peak_bytes, 300);
  EXPECT_EQ(second->report().workspace, 300);
  second.reset();
  const Tensor c = torch::empty({5}, torch::kUInt8);
  EXPECT_EQ(first.report().live_bytes, 1005);
}

TEST(MemoryMeter, SeesAllocationsOfOtherThreads) {
  const MemoryMeter meter;
  Tensor from_elsewhere;
  std::thread([&] { from_elsewhere = torch::empty({1234}, torch::kUInt8); }).join();
  EXPECT_EQ(meter.report().live_bytes, 1234);
}

TEST(MemoryMeter, SeesWhatSavedTensorHooksKeepInsteadOfTheTensor) {
  Chain chain;
  MemoryMeter meter;
  meter.attach(*chain.model);
  Tensor loss;
  {
    const SavedTensorHooks in_bf16([](const Tensor& t) { return std::any(t.to(torch::kBFloat16)); },
                                   [](std::any& kept) { return std::any_cast<Tensor&>(kept).to(torch::kFloat); });
    loss = chain.model->forward(chain.x).sum();
  }
  make_the_peak_here(meter);
  // Two casts of each layer's result, as ReLU's and as the next Linear's (the last has no next), one of x, one of each
  // weight but the first's, whose input needs no gradient.
  const int64_t half = Chain::kActivation / 2;
  const int64_t weights = (Chain::kLayers - 1) * Chain::kWidth * Chain::kWidth * 2;
  EXPECT_EQ(meter.report().activations, (2 * Chain::kLayers - 1) * half + half + weights);
}

// The hook through which a meter learns of saved tensors must not change anything.
TEST(MemoryMeter, DoesNotChangeGradientsNorTheErrorOfAnInPlaceWrite) {
  Chain chain;
  chain.model->forward(chain.x).sum().backward();
  const auto plain = testing::gradients_of(*chain.model);
  const MemoryMeter meter;
  chain.model->zero_grad();
  chain.model->forward(chain.x).sum().backward();
  EXPECT_TRUE(testing::same_bits(testing::gradients_of(*chain.model), plain));

  const Tensor a = torch::rand({3}, torch::requires_grad());
  const Tensor y = a.exp();
  y.add_(1);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(MemoryMeter, ReportsTheSameTwiceAndItsOwnReportIsNotCounted) {
  Chain chain;
  MemoryMeter meter;
  meter.attach(*chain.model);
  AdamW optimizer(chain.model->parameters());
  meter.attach(optimizer);
  chain.model->forward(chain.x).sum().backward();
  optimizer.step();
  const auto first = meter.report();
  const auto second = meter.report();
  EXPECT_EQ(first.peak_bytes, second.peak_bytes);
  EXPECT_EQ(first.live_bytes, second.live_bytes);
  EXPECT_EQ(first.activations, second.activations);
  EXPECT_EQ(first.workspace, second.workspace);
}

}  // namespace
}  // namespace snug::meter_test
