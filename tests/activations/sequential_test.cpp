#include <algorithm>
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/sliced.h"
#include "tests/support/tensors.h"

namespace snug::sequential_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

struct CountedImpl : torch::nn::Module {
  CountedImpl(torch::nn::AnyModule inner, int* calls) : inner_(std::move(inner)), calls_(calls) {
    register_module("inner", inner_.ptr());
  }
  Tensor forward(Tensor x) {
    ++*calls_;
    return inner_.forward(std::move(x));
  }

 private:
  torch::nn::AnyModule inner_;
  int* calls_;
};
TORCH_MODULE(Counted);

/// Linear 10-20-30-40 with a ReLU after each, all counted.
struct Layers {
  std::vector<int> calls = std::vector<int>(6, 0);
  torch::nn::Sequential model;

  Layers() {
    torch::manual_seed(3);
    for (size_t i = 0; i < 3; ++i) {
      const auto width = static_cast<int64_t>(10 * (i + 1));
      add(2 * i, torch::nn::AnyModule(torch::nn::Linear(width, width + 10)));
      add(2 * i + 1, torch::nn::AnyModule(torch::nn::ReLU()));
    }
  }
  Layers(const Layers&) = delete;

  std::vector<Tensor> gradients(const std::function<Tensor(Tensor)>& forward) {
    std::fill(calls.begin(), calls.end(), 0);
    model->zero_grad();
    const Tensor x = torch::linspace(-1, 1, 40).view({4, 10}).requires_grad_();
    forward(x).pow(2).sum().backward();
    auto result = gradients_of(*model);
    result.push_back(x.grad());
    return result;
  }

 private:
  void add(size_t index, torch::nn::AnyModule inner) { model->push_back(Counted(std::move(inner), &calls[index])); }
};

TEST(CheckpointSequential, GivesGradientsEqualToTheBitAndCallsEachLayerOnce) {
  Layers layers;
  const auto expected = layers.gradients([&](const Tensor& x) { return layers.model->forward(x); });
  for (const int64_t segments : {1, 2}) {
    for (const LastSegment last : {LastSegment::Plain, LastSegment::Recompute}) {
      const auto run = [&](const Tensor& x) { return checkpoint_sequential(layers.model, segments, x, last); };
      EXPECT_TRUE(same_bits(layers.gradients(run), expected)) << segments;
      EXPECT_EQ(layers.calls, std::vector(6, 1)) << segments;
    }
  }
}

// Which results of `layers` exponentials are in memory between forward and backward. An exponential saves its result.
// So a plain segment keeps every result, and a checkpointed segment keeps the input; the caller has the last result.
std::vector<bool> kept_by(int64_t layers, int64_t segments, LastSegment last = LastSegment::Plain) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> results;
  const std::vector<std::function<Tensor(Tensor)>> functions(static_cast<size_t>(layers), [&](const Tensor& x) {
    Tensor result = x.exp();
    results.push_back(result.storage().getWeakStorageImpl());
    return result;
  });
  const Tensor x = torch::zeros({2}, torch::requires_grad());
  const Tensor y = checkpoint_sequential(functions, segments, x, last);
  std::vector<bool> kept;
  for (const auto& result : results) {
    kept.push_back(!result.expired());
  }
  return kept;
}

TEST(CheckpointSequential, CutsAsPythonDoesWithTheRemainderInTheLastSegment) {
  EXPECT_THAT(kept_by(6, 3), ElementsAre(false, true, false, false, true, true));
  EXPECT_THAT(kept_by(5, 2), ElementsAre(false, false, true, true, true));
  EXPECT_THAT(kept_by(4, 4), ElementsAre(true, true, false, true));
  EXPECT_THAT(kept_by(5, 2, LastSegment::Recompute), ElementsAre(false, true, false, false, true));
}

TEST(CheckpointSequential, WorksOnDropoutWithTheMaskOfTheForward) {
  const auto gradients = [](int64_t segments) {
    torch::manual_seed(5);
    torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 8),
                                torch::nn::Dropout(0.5));
    const Tensor x = torch::ones({4, 8});
    (segments == 0 ? model->forward(x) : checkpoint_sequential(model, segments, x, LastSegment::Recompute))
        .pow(2)
        .sum()
        .backward();
    return gradients_of(*model);
  };
  EXPECT_TRUE(same_bits(gradients(2), gradients(0)));
  EXPECT_TRUE(same_bits(gradients(4), gradients(0)));
}

TEST(CheckpointSequential, MakesAboutTheRootOfTheirNumberWhereNoneIsGivenInEveryCall) {
  for (int call = 0; call < 2; ++call) {
    EXPECT_THAT(kept_by(9, 0), ElementsAre(false, false, true, false, false, false, true, true, true));
    EXPECT_THAT(kept_by(5, 0), ElementsAre(false, false, true, true, true));
    EXPECT_THAT(kept_by(1, 0), ElementsAre(true));
    EXPECT_THAT(kept_by(3, 0, LastSegment::Recompute), ElementsAre(true, false, true));
  }
}

TEST(CheckpointSequential, InsideOfAnotherRegionGivesGradientsEqualToTheBit) {
  Layers layers;
  const auto expected = layers.gradients([&](const Tensor& x) { return layers.model->forward(x); });
  const auto inside = [&](const Tensor& x) {
    return checkpoint([&](const Tensor& t) { return checkpoint_sequential(layers.model, 0, t); }, x);
  };
  EXPECT_TRUE(same_bits(layers.gradients(inside), expected));
}

TEST(CheckpointSequential, RefusesSegmentsThatCannotBe) {
  const std::vector<std::function<Tensor(Tensor)>> layers(3, [](const Tensor& x) { return x.exp(); });
  const Tensor x = torch::zeros({2}, torch::requires_grad());
  for (const int64_t segments : {-1, 4}) {
    EXPECT_THAT(error_of<ConfigError>([&] { checkpoint_sequential(layers, segments, x); }),
                AllOf(HasSubstr("segments is " + std::to_string(segments)), HasSubstr("between 1 and 3")));
  }
  EXPECT_THROW(checkpoint_sequential(torch::nn::Sequential(), 1, x), ConfigError);
}

}  // namespace
}  // namespace snug::sequential_test
