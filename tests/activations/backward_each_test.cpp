#include "snug/activations/backward_each.h"

#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/memory/meter.h"
#include "snug/precision/autocast.h"
#include "snug/precision/grad_scaler.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::backward_each_test {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using Function = std::function<Tensor(Tensor)>;

// A trunk and heads that use its output several times each, so that the order of additions shows in the bits.
struct MultiTask {
  torch::nn::Sequential trunk = make_mlp({8, 32, 32}, 0, 1);
  std::vector<torch::nn::Sequential> layers;
  Tensor x = torch::randn({64, 8});

  explicit MultiTask(uint64_t count = 4) {
    for (uint64_t i = 0; i < count; ++i) {
      layers.push_back(make_mlp({32, 48, 32}, 0, 2 + i));
    }
  }
  std::vector<Function> heads() const {
    std::vector<Function> all;
    for (const auto& layer : layers) {
      all.emplace_back([layer = layer](Tensor h) mutable { return layer->forward(h) * torch::tanh(h) + h; });
    }
    return all;
  }
  static std::vector<Function> losses(size_t count) {
    return std::vector<Function>(count, [](Tensor y) { return y.square().mean(); });
  }
  Tensor sum(std::vector<Tensor>* each = nullptr) {
    const Tensor h = trunk->forward(x);
    Tensor total;
    for (auto& head : heads()) {
      const Tensor loss = head(h).square().mean();
      if (each != nullptr) {
        each->push_back(loss.detach());
      }
      total = total.defined() ? total + loss : loss;
    }
    return total;
  }
  std::vector<Tensor> each(GradScaler* scaler = nullptr) {
    return backward_each([this] { return trunk->forward(x); }, heads(), losses(layers.size()), scaler);
  }
  std::vector<Tensor> parameters() const {
    auto all = trunk->parameters();
    for (const auto& layer : layers) {
      for (const auto& parameter : layer->parameters()) {
        all.push_back(parameter);
      }
    }
    return all;
  }
  std::vector<Tensor> take_gradients() const {
    auto gradients = gradients_of(parameters());
    for (auto parameter : parameters()) {
      parameter.mutable_grad().reset();
    }
    return gradients;
  }
};

TEST(BackwardEach, GivesTheSumsLossesAndGradientsToTheBit) {
  MultiTask model;
  std::vector<Tensor> expected_losses;
  model.sum(&expected_losses).backward();
  const auto expected = model.take_gradients();
  const auto losses = model.each();
  EXPECT_TRUE(same_bits(losses, expected_losses));
  EXPECT_FALSE(losses[0].requires_grad());
  EXPECT_TRUE(same_bits(model.take_gradients(), expected));
}

TEST(BackwardEach, AddsToGradientsThatAreThere) {
  MultiTask model;
  model.sum().backward();
  model.sum().backward();
  const auto expected = model.take_gradients();
  model.each();
  model.each();
  EXPECT_TRUE(same_bits(model.take_gradients(), expected));
}

TEST(BackwardEach, GivesTheSameBitsUnderAutocastWithAScaler) {
  MultiTask model;
  GradScaler scaler({.init_scale = 1024});
  Tensor sum;
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    sum = scaler.scale(model.sum());
  }
  sum.backward();
  const auto expected = model.take_gradients();
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    model.each(&scaler);
  }
  EXPECT_TRUE(same_bits(model.take_gradients(), expected));
}

TEST(BackwardEach, GoesBackwardOutsideOfAutocastAsTheSumDoes) {
  MultiTask model;
  const auto in_float32 = [&](const Tensor& h) {
    const Autocast off(torch::kCPU, torch::kBFloat16, {.enabled = false});
    return model.layers[0]->forward(h.to(torch::kFloat)).square().sum();
  };
  const auto run = [&](bool each) {
    Tensor loss;
    {
      const Autocast autocast(torch::kCPU, torch::kBFloat16);
      if (each) {
        backward_each(model.trunk->forward(model.x), {in_float32});
      } else {
        loss = in_float32(model.trunk->forward(model.x));
      }
    }
    if (!each) {
      loss.backward();
    }
    return model.take_gradients();
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST(BackwardEach, LeavesATrunkThatNeedsNoGradientAlone) {
  MultiTask model;
  const Tensor h = model.trunk->forward(model.x).detach();
  backward_each(h, {[&](Tensor t) { return model.layers[0]->forward(t).sum(); }});
  EXPECT_TRUE(model.layers[0]->parameters()[0].grad().defined());
  EXPECT_FALSE(h.grad().defined());
}

TEST(BackwardEach, AcceptsAHeadThatDoesNotLookAtTheTrunk) {
  MultiTask model;
  Tensor own = torch::ones({2}, torch::requires_grad());
  const Tensor h = model.trunk->forward(model.x);
  backward_each(h, {[](Tensor t) { return t.sum(); }, [&](const Tensor&) { return own.sum(); }});
  EXPECT_TRUE(torch::equal(own.grad(), torch::ones(2)));
  EXPECT_TRUE(model.trunk->parameters()[0].grad().defined());
}

// What is above the parameters' gradients, which are there before.
int64_t peak_of(const std::function<void()>& step) {
  step();
  const MemoryMeter meter;
  step();
  return meter.report().peak_bytes;
}

TEST(BackwardEach, HoldsTheActivationsOfOneHeadHoweverManyThereAre) {
  const auto peaks = [](uint64_t heads) {
    MultiTask model(heads);
    const int64_t each = peak_of([&] { model.each(); });
    const int64_t sum = peak_of([&] { model.sum().backward(); });
    return std::pair(each, sum);
  };
  const auto [each_of_3, sum_of_3] = peaks(3);
  const auto [each_of_9, sum_of_9] = peaks(9);
  EXPECT_LE(each_of_9 - each_of_3, 6 * 64) << "a loss for each";
  // A head saves two activations of width 48, three of width 32 at least.
  EXPECT_GE(sum_of_9 - sum_of_3, 6 * 64 * (2 * 48 + 3 * 32) * 4);
  EXPECT_LT(each_of_3, sum_of_3);
}

TEST(BackwardEach, SaysWhichHeadGaveNoLoss) {
  MultiTask model;
  const Tensor h = model.trunk->forward(model.x);
  const Function good = [](Tensor t) { return t.sum(); };
  const auto message = [&](const std::vector<Function>& heads) {
    return error_of<ConfigError>([&] { backward_each(h, heads); });
  };
  EXPECT_THAT(message({}), HasSubstr("there are no heads"));
  EXPECT_THAT(message({good, [](Tensor t) { return t; }, good}), HasSubstr("head 1 returned [64, 32]"));
  EXPECT_THAT(message({good, [](Tensor t) { return t.detach().sum(); }}), HasSubstr("the loss of head 1 depends on"));
  EXPECT_THAT(error_of<ConfigError>([&] { backward_each([&] { return h; }, {good}, {}); }),
              HasSubstr("1 heads and 0 losses"));
}

}  // namespace
}  // namespace snug::backward_each_test
