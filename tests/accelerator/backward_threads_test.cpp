// LibTorch runs a backward pass of an accelerator on a thread of the device, where scopes of the program's thread are
// unknown. First in its program, since a process's first backward starts these threads.

#include <any>
#include <tuple>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/memory.h"
#include "src/memory/backward_pass.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/tensors.h"

namespace snug::backward_threads_test {
namespace {

using testing::accelerator;
using testing::gradients;
using testing::leaf;
using testing::same_bits;
using torch::Tensor;

TEST(BackwardOnAnAccelerator, WorksWithHooksThatBeginAfterAnEarlierBackward) {
  torch::ones({2}, torch::requires_grad()).exp().sum().backward();
  const Tensor x = leaf({5});
  const auto expected = gradients(x.exp(), {x});
  int packed = 0, unpacked = 0;
  Tensor y;
  {
    const SavedTensorHooks hooks(
        [&](const Tensor& tensor) {
          ++packed;
          return std::any(tensor.detach());
        },
        [&](std::any& kept) {
          ++unpacked;
          return std::any_cast<Tensor>(kept);
        });
    y = x.exp();
  }
  EXPECT_TRUE(same_bits(gradients(y, {x}), expected));
  EXPECT_EQ(packed, 1);
  EXPECT_EQ(unpacked, 1);
}

TEST(BackwardOnAnAccelerator, HandsToHooksWhatAPassInsideThemSaves) {
  const Tensor x = leaf({5});
  const auto saved_by = [&](c10::Device device) {
    const Tensor t = x.detach().to(device).requires_grad_();
    int packed = 0;
    const SavedTensorHooks hooks(
        [&](const Tensor& tensor) {
          ++packed;
          return std::any(tensor.detach());
        },
        [](std::any& kept) { return std::any_cast<Tensor>(kept); });
    torch::autograd::grad({t.exp().sin().sum()}, {t}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return packed;
  };
  EXPECT_EQ(saved_by(accelerator()), saved_by(torch::kCPU));
}

Tensor slope(const Tensor& t, const Tensor& w) {
  const Tensor y = (t * w).exp().sin().sum();
  return torch::autograd::grad({y}, {t}, {}, /*retain_graph=*/true, /*create_graph=*/true).front();
}

TEST(BackwardOnAnAccelerator, RecomputesARegionThatGoesBackwardItself) {
  const Tensor x = leaf({5}), w = leaf({5});
  const auto body = [](const Tensor& t, const Tensor& v) { return slope(t, v) * t.cos() + slope(t * v, v); };
  const auto expected = gradients(body(x, w), {x, w});
  EXPECT_TRUE(same_bits(gradients(checkpoint(body, x, w), {x, w}), expected));
}

TEST(BackwardOnAnAccelerator, KeepsTheSameResultsOfARegionThatGoesBackwardItself) {
  const Tensor x = leaf({4, 4}), w = leaf({4, 4});
  const auto body = [](const Tensor& t, const Tensor& v) {
    const Tensor y = t.matmul(v).sin().matmul(v).sum();
    const Tensor inner = torch::autograd::grad({y}, {t}, {}, /*retain_graph=*/true, /*create_graph=*/true).front();
    return inner.matmul(v).cos().matmul(t);
  };
  Tensor plain;
  {
    const detail::BackwardOnThisThread here;  // nodes that another thread makes have another order in backward
    plain = body(x, w);
  }
  const auto expected = gradients(plain, {x, w});
  EXPECT_TRUE(same_bits(gradients(checkpoint({.policy = save_matmuls}, body, x, w), {x, w}), expected));
}

TEST(BackwardOnAnAccelerator, RecomputesWithTheRandomNumbersOfTheForward) {
  const Tensor x = leaf({64});
  const auto body = [](const Tensor& t) {
    const Tensor dropped = torch::dropout(t.sin(), 0.5, /*train=*/true);
    return (dropped * torch::rand_like(t) + torch::randn({64}, t.options())).exp();
  };
  torch::manual_seed(3);
  const Tensor plain = body(x);
  const auto expected = gradients(plain, {x});
  const Tensor next = torch::rand({4}, accelerator());
  torch::manual_seed(3);
  const Tensor y = checkpoint(body, x);
  EXPECT_TRUE(same_bits(y, plain));
  EXPECT_TRUE(same_bits(gradients(y, {x}), expected));
  EXPECT_TRUE(same_bits(torch::rand({4}, accelerator()), next)) << "the generator goes on as in plain training";
}

TEST(BackwardOnAnAccelerator, KeepsWhatTheRegionDrawsWithoutAnOperator) {
  if (!sim_device::is_present()) {
    GTEST_SKIP() << "the numbers of CUDA's generators are drawn by kernels";
  }
  const Tensor x = leaf({8});
  const auto body = [](const Tensor& t) {
    auto generator = at::globalContext().defaultGenerator(accelerator());
    const double drawn = generator.get<at::CPUGeneratorImpl>()->random() * 0x1p-32;
    return (t * drawn).exp();
  };
  torch::manual_seed(3);
  const auto expected = gradients(body(x), {x});
  torch::manual_seed(3);
  EXPECT_TRUE(same_bits(gradients(checkpoint(body, x), {x}), expected));
}

}  // namespace
}  // namespace snug::backward_threads_test
