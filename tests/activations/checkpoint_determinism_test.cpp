// What differs between a region's forward and its recomputation is found; and what does not is not.

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
#include "tests/support/tensors.h"

namespace snug::checkpoint_determinism_test {
namespace {

using testing::clones_of;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

// A queue of negatives, into which the step enqueues before it goes backward.
TEST(CheckpointReads, OfMemoryThatIsWrittenBeforeBackwardAreAnErrorThatNamesRegionAndOperator) {
  const Tensor w = torch::rand({4, 4}, torch::requires_grad()), x = torch::rand({2, 4});
  const Tensor queue = torch::rand({8, 4});
  const auto logits = [&](const Tensor& h) { return h.mm(w).mm(queue.narrow(0, 0, 4).clone().t()); };
  const Tensor y = checkpoint({.label = "contrast"}, logits, x);
  queue.narrow(0, 6, 2).zero_();
  const auto error = error_of<c10::Error>([&] { y.sum().backward(); });
  EXPECT_THAT(error, HasSubstr("checkpoint 'contrast': operator"));
  EXPECT_THAT(error, HasSubstr("(aten::clone) reads a tensor from outside of the region, [4, 4]"));
  EXPECT_THAT(error, HasSubstr("modified by an inplace operation"));
  y.sum();
  checkpoint(logits, x).sum().backward();  // and the queue is written after it
  queue.zero_();
  EXPECT_TRUE(w.grad().defined());
}

TEST(CheckpointReads, OfAParameterThatNothingSavedAreNoticedTooIfItIsWritten) {
  torch::nn::Linear layer(3, 3);
  const Tensor x = torch::rand({2, 3}, torch::requires_grad());
  const Tensor loss = checkpoint([layer](const Tensor& h) mutable { return layer->forward(h).relu(); }, x).sum();
  {
    const torch::NoGradGuard no_grad;
    layer->bias.add_(1.0);
  }
  EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(CheckpointReads, OfTheShapeAloneAndOfWhatTheRecomputationDoesNotGetToAreFreeToBeWritten) {
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

TEST(CheckpointDeterminism, ValuesFindsAWriteThatAutogradDoesNotCount) {
  torch::nn::Linear layer(3, 3);
  const auto backward_after_a_write = [&](Determinism determinism) {
    const Tensor x = torch::rand({2, 3}, torch::requires_grad());
    const Tensor loss = checkpoint(
                            {.determinism = determinism, .label = "layer"},
                            [layer](const Tensor& h) mutable { return layer->forward(h).relu(); }, x)
                            .sum();
    layer->bias.data().add_(1.0);
    loss.backward();
  };
  EXPECT_NO_THROW(backward_after_a_write(Determinism::Metadata));
  const auto error = error_of<Error>([&] { backward_after_a_write(Determinism::Values); });
  EXPECT_THAT(error, HasSubstr("checkpoint 'layer': saved tensor"));
  EXPECT_THAT(error, HasSubstr("(aten::relu)"));
  EXPECT_THAT(error, HasSubstr("other values"));
}

// A recurrent layer saves a workspace of which it does not fill every byte.
TEST(CheckpointDeterminism, ValuesFindsNothingInALstm) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 6).num_layers(2).dropout(0.3));
  const Tensor x = torch::rand({7, 3, 5}, torch::requires_grad());
  const auto forward = [lstm](const Tensor& h) mutable { return std::get<0>(lstm->forward(h)).tanh(); };
  for (int round = 0; round < 5; ++round) {
    torch::full({1 << 14}, round);  // other bytes in the memory that is given out next
    EXPECT_NO_THROW(checkpoint({.determinism = Determinism::Values}, forward, x).sum().backward());
  }
}

TEST(CheckpointDeterminism, ValuesFindsNothingWhereNothingDiffers) {
  torch::nn::Sequential model(torch::nn::Linear(3, 5), torch::nn::Dropout(0.5), torch::nn::BatchNorm1d(5));
  const Tensor x = torch::rand({4, 3}, torch::requires_grad());
  EXPECT_NO_THROW(checkpoint({.determinism = Determinism::Values}, model, x).sum().backward());
}

TEST(CheckpointDeterminism, ErrorsNameTheOperatorWhereTheRecomputationTurnsOff) {
  bool other = false;
  const Tensor x = torch::rand({2, 3}, torch::requires_grad());
  const Tensor loss =
      checkpoint(
          {.label = "turn"},
          [&](const Tensor& h) { return other ? h.exp().sum(0).tanh().sin() : h.exp().tanh().sin(); }, x)
          .sum();
  other = true;
  const auto error = error_of<Error>([&] { loss.backward(); });
  EXPECT_THAT(error, HasSubstr("checkpoint 'turn'"));
  EXPECT_THAT(error,
              HasSubstr("operators differ from number 2 on: aten::tanh in forward, aten::sum in the recomputation"));
}

TEST(CheckpointDeterminism, EqualShapesInAnotherOrderAreAnError) {
  const auto error_with = [](const std::function<Tensor(const Tensor&, const Tensor&, bool)>& body) {
    bool again = false;
    const Tensor x = torch::rand({3}, torch::requires_grad()), w = torch::rand({3}, torch::requires_grad());
    const Tensor y =
        checkpoint({.label = "swap"}, [&](const Tensor& a, const Tensor& b) { return body(a, b, again); }, x, w);
    again = true;
    return error_of<Error>([&] { y.sum().backward(); });
  };
  const std::string arguments =
      error_with([](const Tensor& a, const Tensor& b, bool again) { return (again ? b * a : a * b).exp(); });
  EXPECT_THAT(arguments, HasSubstr("checkpoint 'swap': saved tensor 0"));
  EXPECT_THAT(arguments, HasSubstr("came about in another way"));
  const std::string results = error_with([](const Tensor& a, const Tensor& b, bool again) {
    const Tensor sin = a.detach().sin(), cos = a.detach().cos();
    return again ? sin * b + cos * a : cos * b + sin * a;
  });
  EXPECT_THAT(results, HasSubstr("came about in another way"));
}

// A table that a module makes in its first call, and then longer ones in its place.
TEST(CheckpointDeterminism, TablesThatAModuleRemembersMayBeMadeOnceAndBeReplacedByOthers) {
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
  for (const bool is_exact : {false, true}) {  // then the recomputation makes again what the forward found
    EXPECT_TRUE(same_bits(gradients(true, is_exact), gradients(false, is_exact)));
  }
}

}  // namespace
}  // namespace snug::checkpoint_determinism_test
