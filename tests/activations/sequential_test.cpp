#include "snug/activations/sequential.h"

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/activations/checkpoint.h"
#include "snug/activations/detail/segments.h"
#include "snug/core/error.h"
#include "snug/memory/meter.h"
#include "tests/support/tensors.h"

namespace snug::sequential_test {
namespace {

using ::testing::AllOf;
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

TEST(CheckpointSequential, InTwoSegmentsGivesGradientsEqualToTheBitAndCallsTheFirstSegmentTwice) {
  Layers layers;
  const auto expected = layers.gradients([&](const Tensor& x) { return layers.model->forward(x); });
  EXPECT_EQ(layers.calls, (std::vector{1, 1, 1, 1, 1, 1}));
  EXPECT_TRUE(same_bits(layers.gradients([&](const Tensor& x) { return checkpoint_sequential(layers.model, 2, x); }),
                        expected));
  EXPECT_EQ(layers.calls, (std::vector{2, 2, 2, 1, 1, 1}));
}

TEST(CheckpointSequential, RecomputesTheLastSegmentTooIfAsked) {
  Layers layers;
  const auto expected = layers.gradients([&](const Tensor& x) { return layers.model->forward(x); });
  const auto all = [&](const Tensor& x) { return checkpoint_sequential(layers.model, 2, x, LastSegment::Recompute); };
  EXPECT_TRUE(same_bits(layers.gradients(all), expected));
  EXPECT_EQ(layers.calls, (std::vector{2, 2, 2, 2, 2, 2}));
}

TEST(CheckpointSequential, OneSegmentIsPlainTrainingOrOneRegion) {
  Layers layers;
  const auto expected = layers.gradients([&](const Tensor& x) { return layers.model->forward(x); });
  EXPECT_TRUE(same_bits(layers.gradients([&](const Tensor& x) { return checkpoint_sequential(layers.model, 1, x); }),
                        expected));
  EXPECT_EQ(layers.calls, std::vector(6, 1));
  const auto one_region = [&](const Tensor& x) {
    return checkpoint_sequential(layers.model, 1, x, LastSegment::Recompute);
  };
  EXPECT_TRUE(same_bits(layers.gradients(one_region), expected));
  EXPECT_EQ(layers.calls, std::vector(6, 2));
}

// How often each of `layers` callables runs in a forward and backward.
std::vector<int> calls_of(int64_t layers, int64_t segments, LastSegment last = LastSegment::Plain) {
  std::vector<int> calls(static_cast<size_t>(layers), 0);
  std::vector<std::function<Tensor(Tensor)>> functions;
  for (int& count : calls) {
    functions.emplace_back([&count](const Tensor& x) {
      ++count;
      return x.exp();
    });
  }
  const Tensor x = torch::zeros({2}, torch::requires_grad());
  checkpoint_sequential(functions, segments, x, last).sum().backward();
  return calls;
}

TEST(CheckpointSequential, CutsAsPythonDoesWithTheRemainderInTheLastSegment) {
  EXPECT_EQ(calls_of(6, 3), (std::vector{2, 2, 2, 2, 1, 1}));
  EXPECT_EQ(calls_of(5, 2), (std::vector{2, 2, 1, 1, 1}));
  EXPECT_EQ(calls_of(4, 4), (std::vector{2, 2, 2, 1}));
  EXPECT_EQ(calls_of(5, 2, LastSegment::Recompute), (std::vector{2, 2, 2, 2, 2}));
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

// --- balanced by measured bytes

// The peak of one way to cut, by the definition of it.
int64_t peak_of(const detail::ChainBytes& bytes, const std::vector<size_t>& ends) {
  int64_t peak = 0;
  int64_t held = 0;
  size_t first = 0;
  for (const size_t end : ends) {
    held += bytes.inputs[first];
    peak = std::max(peak, held + bytes.inside[first][end - 1]);
    first = end;
  }
  return peak;
}

TEST(CheckpointSequential, BalancedSegmentsHaveTheLeastPeakOfAllWaysToCut) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const size_t n = 1 + random() % 8;
    detail::ChainBytes bytes{std::vector<int64_t>(n), std::vector(n, std::vector<int64_t>(n))};
    for (size_t first = 0; first < n; ++first) {
      bytes.inputs[first] = static_cast<int64_t>(random() % 20);
      for (size_t end = first; end < n; ++end) {
        bytes.inside[first][end] =
            (end > first ? bytes.inside[first][end - 1] : 0) + static_cast<int64_t>(random() % 50);
      }
    }
    const auto chosen = detail::least_peak_segments(bytes);
    ASSERT_EQ(chosen.back(), n);
    size_t longest_last = 0;
    for (unsigned cut = 0; cut < 1U << (n - 1); ++cut) {
      std::vector<size_t> ends;
      for (size_t i = 1; i < n; ++i) {
        if ((cut >> (i - 1) & 1U) != 0) {
          ends.push_back(i);
        }
      }
      ends.push_back(n);
      ASSERT_LE(peak_of(bytes, chosen), peak_of(bytes, ends));
      if (peak_of(bytes, ends) == peak_of(bytes, chosen)) {
        longest_last = std::max(longest_last, n - (ends.size() > 1 ? ends[ends.size() - 2] : 0));
      }
    }
    ASSERT_EQ(n - (chosen.size() > 1 ? chosen[chosen.size() - 2] : 0), longest_last);
  }
}

TEST(CheckpointSequential, BalancedGivesGradientsEqualToTheBitInTheMeasuredRunAndLater) {
  for (const LastSegment last : {LastSegment::Plain, LastSegment::Recompute}) {
    Layers layers;
    const auto balanced = [&](const Tensor& x) { return checkpoint_sequential(layers.model, 0, x, last); };
    const auto expected = layers.gradients([&](const Tensor& x) { return layers.model->forward(x); });
    EXPECT_TRUE(same_bits(layers.gradients(balanced), expected));
    EXPECT_EQ(layers.calls, std::vector(6, 2)) << "each layer a segment of its own, to be measured";
    for (int run = 0; run < 2; ++run) {
      EXPECT_TRUE(same_bits(layers.gradients(balanced), expected));
      EXPECT_EQ(layers.calls.front(), 2);
      EXPECT_EQ(layers.calls.back(), last == LastSegment::Plain ? 1 : 2);
    }
  }
}

// Four layers that save eight tensors each, then eight that save one: segments of equal length are far from equal.
std::vector<std::function<Tensor(Tensor)>> uneven_chain() {
  std::vector<std::function<Tensor(Tensor)>> layers;
  for (int i = 0; i < 12; ++i) {
    layers.emplace_back([depth = i < 4 ? 8 : 1](Tensor x) {
      for (int k = 0; k < depth; ++k) {
        x = x.sin();
      }
      return x;
    });
  }
  return layers;
}

TEST(CheckpointSequential, BalancedPeaksNoHigherThanAnyNumberOfEqualSegments) {
  const auto layers = uneven_chain();
  const Tensor x = torch::linspace(0, 1, 1 << 14).requires_grad_();
  const auto peak = [&](int64_t segments) {
    x.mutable_grad().reset();
    const MemoryMeter meter;
    checkpoint_sequential(layers, segments, x, LastSegment::Recompute).sum().backward();
    return meter.report().activations;
  };
  peak(0);  // measures
  const int64_t balanced = peak(0);
  for (int64_t segments = 1; segments <= 12; ++segments) {
    EXPECT_LE(balanced, peak(segments)) << segments;
  }
  EXPECT_LT(balanced, peak(4)) << "about the root";
}

TEST(CheckpointSequential, BalancedInsideOfAnotherRegionIsCutAlikeWhenItIsRecomputed) {
  const auto layers = uneven_chain();
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(0, 1, 50).requires_grad_();
    const auto body = [&](const Tensor& t) {
      return checkpointed ? checkpoint_sequential(layers, 0, t) : checkpoint_sequential(layers, 1, t);
    };
    (checkpointed ? checkpoint(body, x) : body(x)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
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
