// What a planned step changes outside of itself is taken back: by trials, and where it fails or is made again.

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "tests/step/planned_training.h"
#include "tests/support/tensors.h"

namespace snug::step_effects_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;
using namespace testing::planned;

constexpr int64_t kItems = 8;
const Bytes kEnough = Bytes::parse("64MiB");

// A layer, and a buffer that `effect` changes in each forward pass.
struct Net : torch::nn::Module {
  Net(Tensor buffer, std::function<void(Tensor&)> does) : effect(std::move(does)) {
    layer = register_module("layer", torch::nn::Linear(kWidth, kWidth));
    state = register_buffer("state", std::move(buffer));
  }
  Tensor loss(const Tensor& x) {
    const torch::NoGradGuard no_grad;
    effect(state);
    const torch::AutoGradMode grad(true);
    return layer(x).square().mean();
  }
  torch::nn::Linear layer{nullptr};
  std::function<void(Tensor&)> effect;
  Tensor state;
};

enum class Fails { No, ByAnException, OutOfMemory };

// The buffer after two steps, of which the second fails first, and is made again.
Tensor state_after(const std::function<Net()>& make, Bytes budget, Fails fails) {
  torch::manual_seed(1);
  Net net = make();
  SGD optimizer(net.parameters(), {.lr = 0.1});
  Stepper stepper(net, optimizer, {.micro_batch = kItems, .budget = {.memory = budget}});
  const Batch batch{torch::randn({kItems, kWidth})};
  bool is_to_fail = false;
  const auto loss_of = [&](const Batch& micro) {
    const Tensor loss = net.loss(micro[0]);
    if (std::exchange(is_to_fail, false)) {
      TORCH_CHECK_WITH(OutOfMemoryError, fails != Fails::OutOfMemory, "as a library may say");
      throw std::runtime_error("the program's own");
    }
    return Loss::mean(loss, micro.size());
  };
  stepper.step(batch, loss_of);
  is_to_fail = fails != Fails::No;
  if (fails == Fails::ByAnException) {
    EXPECT_THROW(stepper.step(batch, loss_of), std::runtime_error);
  }
  stepper.step(batch, loss_of);
  return net.state.is_sparse() ? net.state.to_dense() : net.state.clone();
}

struct Case {
  const char* name;
  std::function<Net()> make;
};

std::vector<Case> cases() {
  return {
      {"written", [] { return Net(torch::ones({4}), [](Tensor& state) { state.mul_(3); }); }},
      {"zeros that are written", [] { return Net(torch::zeros({4}), [](Tensor& state) { state.add_(1); }); }},
      {"through a view", [] { return Net(torch::ones({4, 4}), [](Tensor& state) { state.select(0, 1).add_(1); }); }},
      {"expanded",
       [] { return Net(torch::ones({1}).expand({16}), [](Tensor& state) { state.as_strided({1}, {1}).mul_(2); }); }},
      {"grown by set_data",
       [] {
         return Net(torch::ones({1, 2}),
                    [](Tensor& state) { state.set_data(torch::cat({state, state.narrow(0, 0, 1) + 1}).contiguous()); });
       }},
      {"resized in place",
       [] { return Net(torch::ones({2}), [](Tensor& state) { state.resize_({state.size(0) + 2}).fill_(7); }); }},
      {"grown from nothing",
       [] { return Net(torch::zeros({0}), [](Tensor& state) { torch::arange_out(state, state.numel() + 3); }); }},
      {"sparse", [] { return Net(torch::eye(4).to_sparse(), [](Tensor& state) { state._values().mul_(2); }); }},
      {"moved by a generator",
       [] { return Net(torch::zeros({4}), [](Tensor& state) { state.add_(torch::rand({4})); }); }},
  };
}

TEST(StepEffects, OfTrialsAndFailuresAreTakenBackWhateverTheBufferIs) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    const Tensor plain = state_after(one.make, Bytes::unlimited(), Fails::No);
    for (const Fails fails : {Fails::No, Fails::ByAnException, Fails::OutOfMemory}) {
      SCOPED_TRACE(static_cast<int>(fails));
      EXPECT_TRUE(torch::equal(state_after(one.make, kEnough, fails), plain));
    }
  }
}

TEST(StepEffects, OnGradientsOfOthersAreTakenBackWhereAStepIsMadeAgain) {
  const auto gradient = [](bool runs_out) {
    torch::manual_seed(1);
    torch::nn::Linear encoder(kWidth, kWidth), decoder(kWidth, kWidth);
    SGD optimizer(encoder->parameters(), {.lr = 0.1});
    Stepper stepper(encoder, optimizer, {.micro_batch = 4, .budget = {.memory = kEnough}});
    const Batch batch{torch::randn({kItems, kWidth})};
    int calls = 0;
    const auto loss_of = [&](const Batch& micro) {
      TORCH_CHECK_WITH(OutOfMemoryError, !runs_out || ++calls != 2, "as a library may say");
      return Loss::mean(decoder(encoder(micro[0])).square().mean(), micro.size());
    };
    const bool fails = std::exchange(runs_out, false);
    stepper.step(batch, loss_of);  // its gradient stays
    runs_out = fails;
    EXPECT_EQ(stepper.step(batch, loss_of).step_downs, fails ? 1 : 0);
    return decoder->weight.grad().clone();
  };
  EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
}

TEST(StepEffects, OfBackwardPassesInsideTheLossAreThoseOfOneStep) {
  const auto train = [](Bytes budget) {
    torch::manual_seed(1);
    torch::nn::Linear trunk(kWidth, kWidth), head(kWidth, 1);
    torch::nn::Sequential model(trunk, head);
    SGD optimizer(model->parameters(), {.lr = 0.1});
    Stepper stepper(model, optimizer, {.micro_batch = kItems, .budget = {.memory = budget}});
    const Batch batch{torch::randn({kItems, kWidth})};
    for (int step = 0; step < 2; ++step) {
      stepper.step(batch, [&](const Batch& micro) {
        const Tensor h = torch::gelu(trunk(micro[0]));
        const Tensor z = h.detach().requires_grad_();
        head(z).square().mean().backward();
        return Loss::whole((h * z.grad()).sum());
      });
    }
    return testing::clones_of(model->parameters());
  };
  EXPECT_TRUE(testing::same_bits(train(kEnough), train(Bytes::unlimited())));
}

TEST(StepEffects, OnABufferThatTheFirstForwardPassRegistersAreRefused) {
  struct Counting : torch::nn::Module {
    Counting() { layer = register_module("layer", torch::nn::Linear(kWidth, kWidth)); }
    Tensor loss(const Tensor& x) {
      const Tensor h = layer(x);
      const torch::NoGradGuard no_grad;
      if (load.defined()) {
        load.add_(1);
      } else {
        load = register_buffer("load", torch::ones({4}));
      }
      const torch::AutoGradMode grad(true);
      return h.square().mean();
    }
    torch::nn::Linear layer{nullptr};
    Tensor load;
  } model;
  SGD optimizer(model.parameters(), {.lr = 0.1});
  Stepper stepper(model, optimizer, {.micro_batch = kItems, .budget = {.memory = kEnough}});
  const Batch batch{torch::randn({kItems, kWidth})};
  const auto step = [&] {
    stepper.step(batch, [&](const Batch& micro) { return Loss::mean(model.loss(micro[0]), micro.size()); });
  };
  EXPECT_THAT(error_of<ConfigError>(step), HasSubstr("the buffer 'load'"));
}

// The last step's result is alive until loss_of assigns the variable anew.
TEST(StepEffects, OnAVariableOfTheProgramAreNotCountedForTheWholeStep) {
  enum class Keeps : uint8_t { Nothing, Values, GraphAndGradient };
  const auto peak = [](Keeps keeps, Bytes budget) {
    torch::manual_seed(1);
    torch::nn::Linear first(kWidth, 256);
    torch::nn::Sequential rest(torch::nn::GELU(), torch::nn::Linear(256, 256), torch::nn::GELU(),
                               torch::nn::Linear(256, 256), torch::nn::GELU(), torch::nn::Linear(256, kWidth));
    struct : torch::nn::Module {
    } model;
    model.register_module("first", first.ptr());
    model.register_module("rest", rest.ptr());
    SGD optimizer(model.parameters(), {.lr = 1e-3});
    const Batch batch = make_batch(2048);
    Stepper stepper(model, optimizer, {.micro_batch = 2048, .budget = {.memory = budget}});
    Tensor seen;
    int64_t highest = 0;
    for (int step = 0; step < 3; ++step) {
      const StepResult result = stepper.step(batch, [&](const Batch& micro) {
        const Tensor h = first->forward(micro[0]);
        if (keeps == Keeps::GraphAndGradient) {
          h.retain_grad();
        }
        if (keeps != Keeps::Nothing) {
          seen = keeps == Keeps::Values ? h.detach() : h;
        }
        return Loss::mean(torch::mse_loss(rest->forward(h), micro[1]), micro.size());
      });
      highest = std::max(highest, result.peak_bytes);
    }
    return highest;
  };
  const Bytes budget(peak(Keeps::Nothing, Bytes::unlimited()) * 7 / 10);
  for (const Keeps keeps : {Keeps::Nothing, Keeps::Values, Keeps::GraphAndGradient}) {
    EXPECT_LE(peak(keeps, budget), budget.count());
  }
}

}  // namespace
}  // namespace snug::step_effects_test
