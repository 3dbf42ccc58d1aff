#include <memory>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "tests/support/tensors.h"

// Regions whose callable goes backward itself, as a gradient penalty does.

namespace snug::checkpoint_backward_inside_test {
namespace {

using testing::same_bits;
using torch::Tensor;

/// The slope of sum(sin(exp(t w))) in t. The last tensors that it saves are those of the backward inside.
Tensor slope(const Tensor& t, const Tensor& w) {
  const Tensor y = (t * w).exp().sin().sum();
  return torch::autograd::grad({y}, {t}, {}, /*retain_graph=*/true, /*create_graph=*/true).front();
}

struct Penalty {
  Tensor x = torch::linspace(-1, 1, 5).requires_grad_();
  Tensor w = torch::linspace(0.5, 2, 5).requires_grad_();

  std::vector<Tensor> gradients_of(const Tensor& result) const {
    return torch::autograd::grad({result.pow(2).sum()}, {x, w});
  }
};

// LibTorch counts how deep backward passes are nested on a thread, and past 60 goes on on another one.
TEST(CheckpointBackwardInside, AHundredPenaltiesThatEndTheirRegionGiveGradientsEqualToTheBit) {
  for (const bool early_stop : {true, false}) {
    const Penalty p;
    const auto expected = p.gradients_of(slope(p.x, p.w));
    for (int step = 0; step < 100; ++step) {
      const Tensor result = checkpoint({.early_stop = early_stop}, slope, p.x, p.w);
      ASSERT_TRUE(same_bits(p.gradients_of(result), expected)) << "step " << step << ", early stop " << early_stop;
    }
  }
}

// The tensors that the penalty's backward needs are asked for while the forward still runs.
TEST(CheckpointBackwardInside, WorksWithoutEarlyStopBeforeTheForwardIsComplete) {
  const Penalty p;
  const auto body = [](const Tensor& t, const Tensor& w) { return slope(t, w) * t.cos() + slope(t * w, w); };
  const auto expected = p.gradients_of(body(p.x, p.w));
  for (const bool early_stop : {true, false}) {
    EXPECT_TRUE(same_bits(p.gradients_of(checkpoint({.early_stop = early_stop}, body, p.x, p.w)), expected))
        << early_stop;
  }
}

TEST(CheckpointBackwardInside, ARecomputationMayGoBackwardThroughTheGraphThatItIsRecomputedFor) {
  const Tensor x = torch::linspace(-1, 1, 5).requires_grad_();
  int calls = 0;
  Tensor from_forward, gradient_in_recomputation;
  const Tensor y = checkpoint(
      [&, x](const Tensor& t) {
        const Tensor h = t.exp();
        if (++calls == 1) {
          from_forward = h.sum();
        } else if (calls == 2) {
          gradient_in_recomputation = torch::autograd::grad({from_forward}, {x}, {}, /*retain_graph=*/true).front();
        }
        return h.sin();
      },
      x);
  y.sum().backward();
  EXPECT_TRUE(same_bits(gradient_in_recomputation, x.detach().exp()));
  EXPECT_TRUE(same_bits(x.grad(), x.detach().exp().cos() * x.detach().exp()));
}

}  // namespace
}  // namespace snug::checkpoint_backward_inside_test
