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
  const Penalty p;
  const auto expected = p.gradients_of(slope(p.x, p.w));
  for (int step = 0; step < 100; ++step) {
    ASSERT_TRUE(same_bits(p.gradients_of(checkpoint(slope, p.x, p.w)), expected)) << "step " << step;
  }
}

// The tensors that the penalty's backward needs are asked for while the forward still runs.
TEST(CheckpointBackwardInside, WorksBeforeTheForwardIsComplete) {
  const Penalty p;
  const auto body = [](const Tensor& t, const Tensor& w) { return slope(t, w) * t.cos() + slope(t * w, w); };
  const auto expected = p.gradients_of(body(p.x, p.w));
  EXPECT_TRUE(same_bits(p.gradients_of(checkpoint(body, p.x, p.w)), expected));
}

TEST(CheckpointBackwardInside, AResultThatTheCallableStoresMayGoBackwardBeforeTheRegionDoes) {
  const Tensor x = torch::linspace(-1, 1, 5).requires_grad_();
  Tensor stored;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        const Tensor h = t.exp();
        stored = h.sum();
        return h.sin();
      },
      x);
  const Tensor gradient = torch::autograd::grad({stored}, {x}, {}, /*retain_graph=*/true).front();
  y.sum().backward();
  EXPECT_TRUE(same_bits(gradient, x.detach().exp()));
  EXPECT_TRUE(same_bits(x.grad(), x.detach().exp().cos() * x.detach().exp()));
}

}  // namespace
}  // namespace snug::checkpoint_backward_inside_test
