#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "tests/support/tensors.h"

// What checkpoint() takes and gives: containers of tensors, plain values, any callable.

namespace snug::checkpoint_arguments_test {
namespace {

using testing::same_bits;
using torch::Tensor;

struct Pair {
  Tensor a = torch::linspace(-1, 1, 6).requires_grad_();
  Tensor b = torch::linspace(2, 3, 6).requires_grad_();

  std::vector<Tensor> gradients_of_loss(const Tensor& loss) {
    auto result = torch::autograd::grad({loss}, {a, b});
    return result;
  }
};

TEST(Checkpoint, TakesAndReturnsTuplesVectorsOptionalsAndMaps) {
  Pair p;
  const auto expected = p.gradients_of_loss((p.a.exp() * p.b.sin() + p.b.exp()).sum());

  const auto tuple = [](const std::tuple<Tensor, Tensor>& t) {
    const auto& [a, b] = t;
    return std::make_tuple(a.exp() * b.sin(), b.exp());
  };
  const auto [x, y] = checkpoint(tuple, std::make_tuple(p.a, p.b));
  EXPECT_TRUE(same_bits(p.gradients_of_loss((x + y).sum()), expected));

  const auto vector = [](const std::vector<Tensor>& t) { return std::vector{t[0].exp() * t[1].sin(), t[1].exp()}; };
  const auto outputs = checkpoint(vector, std::vector{p.a, p.b});
  EXPECT_TRUE(same_bits(p.gradients_of_loss((outputs[0] + outputs[1]).sum()), expected));

  const auto optional = [](const Tensor& a, const std::optional<Tensor>& b, const std::optional<Tensor>& none) {
    return none ? std::optional<Tensor>() : std::optional(a.exp() * b->sin() + b->exp());
  };
  EXPECT_TRUE(same_bits(
      p.gradients_of_loss(checkpoint(optional, p.a, std::optional(p.b), std::optional<Tensor>())->sum()), expected));

  const auto map = [](const std::map<std::string, std::pair<Tensor, int>>& t) {
    return t.at("a").first.exp() * t.at("b").first.sin() + t.at("b").first.exp();
  };
  const std::map<std::string, std::pair<Tensor, int>> named{{"a", {p.a, 1}}, {"b", {p.b, 2}}};
  EXPECT_TRUE(same_bits(p.gradients_of_loss(checkpoint(map, named).sum()), expected));

  const auto array = [](const std::array<Tensor, 2>& t) { return t[0].exp() * t[1].sin() + t[1].exp(); };
  EXPECT_TRUE(same_bits(p.gradients_of_loss(checkpoint(array, std::array{p.a, p.b}).sum()), expected));
}

struct Named {
  Tensor y;
  std::map<std::string, Tensor> others;
};

TEST(Checkpoint, TakesAndReturnsStructsAndMaps) {
  Pair p;
  const auto expected = p.gradients_of_loss((p.a.exp() * p.b.sin() + p.b.exp()).sum());
  const auto fn = [](const Named& in) {
    const Tensor& b = in.others.at("b");
    return Named{in.y.exp() * b.sin(), {{"exp", b.exp()}}};
  };
  const Named out = checkpoint(fn, Named{p.a, {{"b", p.b}}});
  EXPECT_TRUE(same_bits(p.gradients_of_loss((out.y + out.others.at("exp")).sum()), expected));
  const auto to_map = [](const Tensor& a, const Tensor& b) {
    return std::map<std::string, std::vector<Tensor>>{{"sum", {a.exp() * b.sin() + b.exp()}}, {"none", {}}};
  };
  EXPECT_TRUE(same_bits(p.gradients_of_loss(checkpoint(to_map, p.a, p.b).at("sum")[0].sum()), expected));
}

TEST(Checkpoint, TakesViewsOfTheCallersTensors) {
  Pair p;
  const auto expected = p.gradients_of_loss((p.a.exp() * p.b.sin() + p.b.exp()).sum());
  const std::vector<Tensor> tensors{p.a, p.b};
  const auto span = [](std::span<const Tensor> t) { return t[0].exp() * t[1].sin() + t[1].exp(); };
  EXPECT_TRUE(same_bits(p.gradients_of_loss(checkpoint(span, tensors).sum()), expected));
  const auto list = [](at::TensorList t) { return t[0].exp() * t[1].sin() + t[1].exp(); };
  EXPECT_TRUE(same_bits(p.gradients_of_loss(checkpoint(list, tensors).sum()), expected));
}

TEST(Checkpoint, TakesPlainValuesAndUndefinedTensors) {
  Pair p;
  const auto fn = [](const Tensor& a, double factor, const std::string& name, const Tensor& undefined,
                     const Tensor& b) {
    EXPECT_FALSE(undefined.defined());
    return a.exp() * factor * static_cast<double>(name.size()) * b.sin();
  };
  const auto expected = p.gradients_of_loss(fn(p.a, 2.5, "four", {}, p.b).sum());
  EXPECT_TRUE(
      same_bits(p.gradients_of_loss(checkpoint(fn, p.a, 2.5, std::string("four"), Tensor(), p.b).sum()), expected));
}

TEST(Checkpoint, TakesCallablesThatCannotBeCopied) {
  const Tensor x = torch::rand({3}, torch::requires_grad());
  Tensor y = checkpoint([factor = std::make_unique<double>(3.0)](const Tensor& t) { return t.exp() * *factor; }, x);
  y.sum().backward();
  EXPECT_TRUE(same_bits(x.grad(), (torch::ones({3}) * 3.0) * x.detach().exp()));
}

TEST(Checkpoint, OutlivesEverythingThatWasMovedIntoIt) {
  Tensor loss;
  const Tensor weight = torch::rand({3}, torch::requires_grad());
  {
    const Tensor temporary = torch::rand({3});
    const std::function<Tensor(Tensor)> fn = [weight](const Tensor& t) { return (t * weight).exp(); };
    loss = checkpoint(fn, temporary + 1).sum();
  }
  EXPECT_NO_THROW(loss.backward());
  EXPECT_TRUE(weight.grad().defined());
}

}  // namespace
}  // namespace snug::checkpoint_arguments_test
