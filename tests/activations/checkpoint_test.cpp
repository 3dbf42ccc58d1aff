#include "snug/checkpoint.h"

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/jit.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/memory.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::checkpoint_test {
namespace {

using ::testing::Contains;
using testing::gradients_of;
using testing::make_mlp;
using ::testing::Not;
using testing::same_bits;
using torch::Tensor;

using Forward = std::function<Tensor(Tensor)>;

struct Result {
  Tensor output;
  std::vector<Tensor> gradients;  // of the model, then of the input
  Tensor next_random;             // what the generator gives after the step
};

/// One forward and backward of `forward`, whose parameters are `model`'s, from a fixed seed.
Result run(const torch::nn::Module& model, const Forward& forward, const Tensor& input) {
  for (auto& parameter : model.parameters()) {
    parameter.mutable_grad().reset();
  }
  torch::manual_seed(11);
  const Tensor x = input.detach().clone().requires_grad_();
  Result result;
  result.output = forward(x);
  (result.output.to(torch::kFloat) * torch::linspace(-1, 1, result.output.numel()).view_as(result.output))
      .sum()
      .backward();
  result.gradients = gradients_of(model);
  result.gradients.push_back(x.grad());
  result.next_random = torch::rand({4});
  return result;
}

void expect_same(const Result& a, const Result& b) {
  EXPECT_TRUE(same_bits(a.output, b.output));
  EXPECT_TRUE(same_bits(a.gradients, b.gradients));
  EXPECT_TRUE(same_bits(a.next_random, b.next_random)) << "the generator must be where plain training leaves it";
}

Forward plain(torch::nn::Sequential model) {
  return [model](const Tensor& x) mutable { return model->forward(x); };
}

Forward in_a_checkpoint(const Forward& forward) {
  return [forward](const Tensor& x) { return checkpoint(forward, x); };
}

TEST(Checkpoint, OfAnMlpGivesGradientsEqualToTheBit) {
  auto model = make_mlp({6, 32, 32, 5});
  const Tensor x = torch::randn({16, 6});
  expect_same(run(*model, in_a_checkpoint(plain(model)), x), run(*model, plain(model), x));
}

TEST(Checkpoint, OfAttentionWithLayerNormGivesGradientsEqualToTheBit) {
  torch::manual_seed(2);
  testing::Attention model(8);
  const Forward forward = [model](const Tensor& x) mutable { return model->forward(x); };
  const Tensor x = torch::randn({3, 5, 8});
  expect_same(run(*model, in_a_checkpoint(forward), x), run(*model, forward, x));
}

TEST(Checkpoint, RecomputesDropoutWithTheMaskOfTheForward) {
  torch::manual_seed(2);
  testing::Attention attention(8, /*dropout=*/0.5);
  auto mlp = make_mlp({8, 32, 8}, /*dropout=*/0.5);
  struct Both : torch::nn::Module {};
  Both model;
  model.register_module("attention", attention.ptr());
  model.register_module("mlp", mlp.ptr());
  const Forward forward = [=](const Tensor& x) mutable {
    return torch::dropout(mlp->forward(attention->forward(x)), 0.3, true);
  };
  const Forward in_parts = [=](const Tensor& x) {
    const auto h = checkpoint([attention](const Tensor& t) mutable { return attention->forward(t); }, x);
    const auto y = checkpoint([mlp](const Tensor& t) mutable { return mlp->forward(t); }, h);
    return torch::dropout(y, 0.3, true);
  };
  const Tensor x = torch::randn({3, 5, 8});
  const auto expected = run(model, forward, x);
  ASSERT_GT((expected.output == 0).sum().item<int64_t>(), 0) << "dropout must be on";
  expect_same(run(model, in_a_checkpoint(forward), x), expected);
  expect_same(run(model, in_parts, x), expected);
}

TEST(Checkpoint, UnderBFloat16AutocastGivesGradientsEqualToTheBit) {
  torch::manual_seed(2);
  testing::Attention model(8, 0.2);
  const Tensor x = torch::randn({3, 5, 8});
  std::vector<c10::ScalarType> dtypes;
  const auto forward_with = [&](bool checkpointed) -> Forward {
    return [&, checkpointed](const Tensor& input) {
      const Autocast autocast(torch::kCPU, torch::kBFloat16);
      const Forward body = [&](const Tensor& t) {
        const Tensor y = model->forward(t);
        dtypes.push_back(torch::matmul(y, y.transpose(1, 2)).scalar_type());
        return y * y;
      };
      return checkpointed ? checkpoint(body, input) : body(input);
    };
  };
  const auto expected = run(*model, forward_with(false), x);
  expect_same(run(*model, forward_with(true), x), expected);
  EXPECT_EQ(dtypes, std::vector<c10::ScalarType>(2, torch::kBFloat16)) << "plain, and in the region";
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
}

TEST(Checkpoint, OfARegionWithoutAutocastIsRecomputedWithoutItInsideAnAutocastRegion) {
  auto model = make_mlp({6, 16, 5});
  std::vector<c10::ScalarType> dtypes;
  const auto gradients = [&](bool checkpointed) {
    model->zero_grad();
    const Forward body = [&](const Tensor& t) {
      const Tensor y = model->forward(t);
      dtypes.push_back(y.scalar_type());
      return y.exp();
    };
    const Tensor x = torch::linspace(-1, 1, 24).view({4, 6}).requires_grad_();
    const Tensor loss = (checkpointed ? checkpoint(body, x) : body(x)).sum();
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    loss.backward();
    EXPECT_TRUE(at::autocast::is_autocast_enabled(torch::kCPU));
    return gradients_of(*model);
  };
  const auto expected = gradients(false);
  EXPECT_TRUE(same_bits(gradients(true), expected));
  EXPECT_EQ(dtypes, std::vector<c10::ScalarType>(2, torch::kFloat));
}

TEST(Checkpoint, CallsEachCallableOnce) {
  auto model = make_mlp({6, 6});
  std::array<int, 3> calls{};
  Tensor x = torch::randn({2, 6});
  for (size_t i = 0; i < 3; ++i) {
    x = checkpoint(
        [&calls, i, model](const Tensor& t) mutable {
          ++calls[i];
          return model->forward(t).tanh();
        },
        x);
  }
  x.sum().backward();
  EXPECT_EQ(calls, (std::array{1, 1, 1}));
}

TEST(Checkpoint, WithoutGradientModeIsOneCall) {
  int calls = 0;
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const torch::NoGradGuard no_grad;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        ++calls;
        return t.exp();
      },
      x);
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(same_bits(y, x.detach().exp()));
}

TEST(Checkpoint, OfInputsWithoutGradientStillTrainsTheParametersInside) {
  auto model = make_mlp({6, 16, 5});
  const Tensor x = torch::randn({4, 6});
  model->forward(x).sum().backward();
  const auto expected = gradients_of(*model);
  model->zero_grad();
  checkpoint(plain(model), x).sum().backward();
  EXPECT_TRUE(same_bits(gradients_of(*model), expected));
}

// cos needs what the inner region returns.
Tensor level(std::array<int, 3>& calls, size_t depth, const Tensor& x, bool checkpointed) {
  ++calls[depth];
  Tensor h = x.sin();
  if (depth > 0) {
    const auto inner = [&calls, depth, checkpointed](const Tensor& t) {
      return level(calls, depth - 1, t, checkpointed);
    };
    h = checkpointed ? checkpoint(inner, h) : inner(h);
  }
  return h.cos();
}

TEST(Checkpoint, NestsThreeDeep) {
  std::array<int, 3> calls{};
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(0.1, 2, 7).requires_grad_();
    const auto body = [&](const Tensor& t) { return level(calls, 2, t, checkpointed); };
    (checkpointed ? checkpoint(body, x) : body(x)).sum().backward();
    return x.grad();
  };
  const Tensor expected = gradient(false);
  calls = {};
  EXPECT_TRUE(same_bits(gradient(true), expected));
  EXPECT_EQ(calls, (std::array{1, 1, 1}));
}

TEST(Checkpoint, NestedWithDropoutGivesGradientsEqualToTheBit) {
  auto model = make_mlp({8, 16, 16, 8}, 0.4);
  const Forward layer = plain(model);
  const Forward twice = [layer](const Tensor& x) { return layer(layer(x).relu()); };
  const Forward nested = [layer](const Tensor& x) {
    return checkpoint(
        [layer](const Tensor& t) {
          return checkpoint(layer, checkpoint([layer](const Tensor& u) { return layer(u); }, t).relu());
        },
        x);
  };
  const Tensor x = torch::randn({4, 8});
  expect_same(run(*model, nested, x), run(*model, twice, x));
}

TEST(Checkpoint, GivesEveryBackwardOfARetainedGraphTheSameGradients) {
  int calls = 0;
  auto model = make_mlp({6, 16, 5});
  const Tensor loss = checkpoint(
                          [&calls, model](const Tensor& x) mutable {
                            ++calls;
                            return model->forward(x);
                          },
                          torch::ones({4, 6}))
                          .pow(2)
                          .sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = gradients_of(*model);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_EQ(calls, 1);
  const auto thrice = gradients_of(*model);
  for (size_t i = 0; i < once.size(); ++i) {
    EXPECT_TRUE(same_bits(thrice[i], once[i] + once[i] + once[i]));
  }
  EXPECT_THROW(loss.backward(), c10::Error) << "the graph is gone";
}

TEST(Checkpoint, WorksWithAutogradGradOfAFewInputs) {
  auto model = make_mlp({6, 16, 5});
  const Tensor x = torch::randn({4, 6}).requires_grad_();
  const Tensor weight = model->parameters().front();
  const auto expected = torch::autograd::grad({model->forward(x).pow(2).sum()}, {weight, x});
  const Tensor loss = checkpoint(plain(model), x).pow(2).sum();
  EXPECT_TRUE(same_bits(torch::autograd::grad({loss}, {weight}, {}, /*retain_graph=*/true).front(), expected[0]));
  EXPECT_TRUE(same_bits(torch::autograd::grad({loss}, {x}).front(), expected[1]));
  EXPECT_FALSE(x.grad().defined());
  EXPECT_FALSE(weight.grad().defined());
}

TEST(Checkpoint, WorksWithDoubleBackward) {
  const auto second_gradients = [](bool checkpointed) {
    auto model = make_mlp({3, 8, 1});
    const Tensor x = torch::linspace(-1, 1, 12).view({4, 3}).requires_grad_();
    const Tensor y = checkpointed ? checkpoint(plain(model), x) : model->forward(x);
    const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true).front();
    (slope.pow(2).sum() + y.pow(2).sum()).backward();
    auto gradients = gradients_of(*model);
    gradients.push_back(x.grad());
    return gradients;
  };
  EXPECT_TRUE(same_bits(second_gradients(true), second_gradients(false)));
}

TEST(Checkpoint, OfAModuleThatIsUsedTwiceAddsBothGradients) {
  auto model = make_mlp({6, 6});
  const Forward twice = [model](const Tensor& x) mutable { return model->forward(model->forward(x).tanh()); };
  const Forward each = [model](const Tensor& x) {
    return checkpoint(plain(model), checkpoint(plain(model), x).tanh());
  };
  const Tensor x = torch::randn({4, 6});
  const auto expected = run(*model, twice, x);
  expect_same(run(*model, in_a_checkpoint(twice), x), expected);
  expect_same(run(*model, each, x), expected);
}

TEST(Checkpoint, WorksInsideSavedTensorHooksWhichSeeWhatComesFromOutside) {
  auto model = make_mlp({6, 16, 5});
  const Tensor x = torch::randn({4, 6});
  const auto expected = run(*model, plain(model), x);
  std::vector<std::vector<int64_t>> packed;
  const Forward hooked = [&](const Tensor& t) {
    const SavedTensorHooks hooks(
        [&](const Tensor& saved) {
          packed.push_back(saved.sizes().vec());
          return std::any(saved.clone());
        },
        [](std::any& kept) { return std::any_cast<Tensor&>(kept); });
    return checkpoint(plain(model), t);
  };
  expect_same(run(*model, hooked, x), expected);
  EXPECT_THAT(packed, Contains(std::vector<int64_t>{4, 6})) << "the region's input";
  EXPECT_THAT(packed, Not(Contains(std::vector<int64_t>{4, 16}))) << "a result from inside";
}

TEST(Checkpoint, LeavesTensorsThatHooksInsideKeepToTheHooks) {
  auto model = make_mlp({6, 16, 5});
  const Tensor x = torch::randn({4, 6});
  const auto expected = run(*model, plain(model), x);
  const Forward hooked = [model](const Tensor& t) mutable {
    const SavedTensorHooks hooks([](const Tensor& saved) { return std::any(saved.clone()); },
                                 [](std::any& kept) { return std::any_cast<Tensor&>(kept); });
    return model->forward(t);
  };
  expect_same(run(*model, in_a_checkpoint(hooked), x), expected);
}

}  // namespace
}  // namespace snug::checkpoint_test
