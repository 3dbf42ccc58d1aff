#include "snug/sliced.h"

#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "src/remat/slice_scope.h"
#include "tests/support/tensors.h"

namespace snug::sliced_test {
namespace {

using testing::close_in_norm;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;
namespace nn = torch::nn;

// A cloud of points: layers that take each by itself, then the largest of each feature, then a head.
struct Cloud {
  static constexpr int64_t kPoints = 600, kFeatures = 32;

  nn::Sequential features{nn::Linear(3, kFeatures), nn::GELU(), nn::Linear(kFeatures, kFeatures), nn::Tanh()};
  nn::Linear head{kFeatures, 1};
  Tensor points;
  int calls = 0;

  Cloud() {
    torch::manual_seed(5);
    for (const auto& parameter : parameters()) {
      torch::NoGradGuard no_grad;
      parameter.uniform_(-0.5, 0.5);
    }
    points = torch::randn({2, kPoints, 3});
  }
  std::vector<Tensor> parameters() const {
    auto all = features->parameters();
    all.push_back(head->weight);
    all.push_back(head->bias);
    return all;
  }
  Tensor largest(const Tensor& some) {
    ++calls;
    return torch::amax(features->forward(some), 1, /*keepdim=*/true);
  }
  Tensor loss(const SlicedOptions& options) {
    const Tensor cloud = sliced([this](Tensor some) { return largest(some); }, points, options).amax(1);
    return head->forward(cloud).pow(2).sum();
  }
  std::vector<Tensor> gradients(const SlicedOptions& options) {
    features->zero_grad();
    head->zero_grad();
    points.mutable_grad().reset();
    loss(options).backward();
    auto all = gradients_of(parameters());
    if (points.requires_grad()) {
      all.push_back(points.grad().clone());
    }
    return all;
  }
};

// Rounding of a sum of n terms in another order, relative to the sum of magnitudes, which here is within twice the norm
// of the sum itself: Higham 2002, section 4.2. Only the terms of the points that are largest in some feature are not 0:
// at most 2 x 32.
constexpr double kBound = 2 * 2 * 64 * static_cast<double>(std::numeric_limits<float>::epsilon()) / 2;

TEST(Sliced, GivesTheGradientsOfTheWhole) {
  Cloud cloud;
  for (const bool wants_input_gradient : {false, true}) {
    cloud.points.set_requires_grad(wants_input_gradient);
    const auto whole = cloud.gradients({.dim = 1, .slices = 1});
    for (const int64_t slices : {2, 7, 600}) {
      const auto parts = cloud.gradients({.dim = -2, .slices = slices});
      ASSERT_EQ(parts.size(), whole.size());
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(close_in_norm(parts[i], whole[i], kBound)) << slices << " slices, tensor " << i;
      }
    }
  }
}

TEST(Sliced, IsTheSameToTheBitEachTimeAndInOneSlicePlain) {
  Cloud cloud;
  EXPECT_TRUE(same_bits(cloud.gradients({.dim = 1, .slices = 5}), cloud.gradients({.dim = 1, .slices = 5})));
  cloud.calls = 0;
  const auto one = cloud.gradients({.dim = 1, .slices = 1});
  EXPECT_EQ(cloud.calls, 1) << "one slice is not checkpointed";
  cloud.features->zero_grad();
  cloud.head->zero_grad();
  cloud.head->forward(cloud.largest(cloud.points).amax(1)).pow(2).sum().backward();
  EXPECT_TRUE(same_bits(gradients_of(cloud.parameters()), one));
}

TEST(Sliced, RunsEachSliceOnceAndHoldsOneAtATime) {
  const auto peak = [](int64_t slices, int* calls) {
    Cloud cloud;
    const MemoryMeter meter;
    cloud.gradients({.dim = 1, .slices = slices});
    *calls = cloud.calls;
    return meter.report().peak_bytes;
  };
  int calls = 0;
  const int64_t whole = peak(1, &calls);
  EXPECT_EQ(calls, 1);
  const int64_t ten = peak(10, &calls);
  EXPECT_EQ(calls, 10);
  EXPECT_LT(ten, whole / 5) << "a tenth, and the parts' results and gradients";
}

TEST(Sliced, CutsAtMultiples) {
  const Tensor input = torch::arange(10);
  std::vector<int64_t> lengths;
  const auto note = [&](Tensor part) {
    lengths.push_back(part.size(0));
    return part + 1;
  };
  EXPECT_TRUE(torch::equal(sliced(note, input, {.slices = 3, .multiple = 3}), input + 1));
  EXPECT_EQ(lengths, (std::vector<int64_t>{6, 4}));
  lengths.clear();
  sliced(note, input, {.slices = 100});
  EXPECT_EQ(lengths, std::vector<int64_t>(10, 1)) << "as many as there are places";
}

TEST(Sliced, LeavesTheNumberToAScopeAndTellsItThatItAsked) {
  int calls = 0;
  const auto count = [&](Tensor part) {
    ++calls;
    return part;
  };
  const Tensor input = torch::ones({12});
  sliced(count, input);
  EXPECT_EQ(calls, 1) << "outside of a scope";
  {
    const detail::SliceScope scope(4);
    EXPECT_FALSE(scope.was_asked());
    sliced(count, input, {.slices = 2});
    EXPECT_FALSE(scope.was_asked()) << "it was told how many";
    EXPECT_EQ(calls, 3);
    sliced(count, input);
    EXPECT_TRUE(scope.was_asked());
    EXPECT_EQ(calls, 7);
  }
  sliced(count, input);
  EXPECT_EQ(calls, 8);
}

// A loop that draws in the same order.
TEST(Sliced, DrawsSliceAfterSlice) {
  const Tensor input = torch::rand({12, 5});
  const auto run = [&](bool by_hand) {
    const Tensor weight = torch::ones({5, 5}, torch::requires_grad());
    torch::manual_seed(9);
    const auto drop = [&](const Tensor& part) { return torch::dropout(part.mm(weight), 0.5, /*train=*/true); };
    const Tensor out =
        by_hand ? torch::cat({drop(input.slice(0, 0, 5)), drop(input.slice(0, 5, 10)), drop(input.slice(0, 10))})
                : sliced(drop, input, {.slices = 3, .multiple = 5});
    out.square().sum().backward();
    return std::vector<Tensor>{out.detach(), weight.grad()};
  };
  EXPECT_TRUE(same_bits(run(false), run(true)));
}

TEST(Sliced, RunsInsideOfACheckpointAndOfItself) {
  const Tensor input = torch::rand({12, 4});
  const Tensor weight = torch::rand({4, 4}).requires_grad_();
  const auto layer = [&](const Tensor& rows) { return rows.mm(weight).tanh(); };
  const auto gradient = [&](const std::function<Tensor(Tensor)>& rows) {
    weight.mutable_grad().reset();
    rows(input).sum().backward();
    return weight.grad();
  };
  const Tensor whole = gradient(layer);
  const auto inner = [&](const Tensor& rows) { return sliced(layer, rows, {.slices = 3}); };
  EXPECT_TRUE(close_in_norm(gradient([&](const Tensor& rows) { return checkpoint(inner, rows); }), whole, kBound));
  EXPECT_TRUE(
      close_in_norm(gradient([&](const Tensor& rows) { return sliced(inner, rows, {.slices = 2}); }), whole, kBound));
}

TEST(Sliced, GivesEverythingBackWhenASliceFails) {
  const Tensor input = torch::rand({12, 4});
  const Tensor weight = torch::rand({4, 4}).requires_grad_();
  const int64_t before = live_bytes(torch::kCPU).count();
  int calls = 0;
  const auto fails_in_forward = [&](const Tensor& rows) {
    if (calls++ == 2) {
      throw std::runtime_error("a bad slice");
    }
    return rows.mm(weight).tanh();
  };
  EXPECT_THAT(error_of<std::runtime_error>([&] { sliced(fails_in_forward, input, {.slices = 4}); }),
              HasSubstr("a bad slice"));
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
  {
    const auto layer = [&](const Tensor& rows) { return rows.mm(weight).tanh(); };
    const Tensor loss = sliced(layer, input, {.slices = 4, .checkpoint = {.label = "rows"}}).sum();
    {
      const torch::NoGradGuard no_grad;
      weight.mul_(2);
    }
    EXPECT_THAT(error_of<Error>([&] { loss.backward(); }),
                HasSubstr("checkpoint 'rows': a parameter, buffer or input"));
  }
  // LibTorch's engine keeps the first gradient of a backward pass that failed, one number, until the next.
  EXPECT_LE(live_bytes(torch::kCPU).count(), before + 4);
}

TEST(Sliced, RefusesWhatCannotBe) {
  const auto same = [](Tensor part) { return part; };
  const Tensor input = torch::ones({4, 2});
  EXPECT_THAT(error_of<ConfigError>([&] { sliced(same, input, {.dim = 2}); }), HasSubstr("dimension 2"));
  EXPECT_THAT(error_of<ConfigError>([&] { sliced(same, Tensor()); }), HasSubstr("no tensor"));
  EXPECT_THAT(error_of<ConfigError>([&] { sliced(same, input, {.slices = -1}); }), HasSubstr("-1"));
  EXPECT_THAT(error_of<ConfigError>([&] { sliced(same, input, {.multiple = 0}); }), HasSubstr("multiple is 0"));
  for (const int64_t slices : {1, 2}) {
    const auto without_dimension = [](Tensor part) { return part.sum(); };
    EXPECT_THAT(error_of<ConfigError>([&] { sliced(without_dimension, input, {.slices = slices}); }),
                HasSubstr("keepdim"));
  }
}

// As where a program goes backward itself, outside of what a Stepper sets.
TEST(Sliced, IsCutAsInForwardInsideARegion) {
  const auto body = [](const Tensor& h) {
    return sliced([](const Tensor& slice) { return slice.exp().sin(); }, h).cos();
  };
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 32).view({8, 4}).clone().requires_grad_();
    Tensor loss;
    {
      const detail::SliceScope scope(4);
      loss = (checkpointed ? checkpoint(body, x) : body(x)).sum();
    }
    loss.backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

}  // namespace
}  // namespace snug::sliced_test
