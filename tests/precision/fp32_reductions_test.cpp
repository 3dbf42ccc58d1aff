// AutocastOptions::fp32_reductions: under CPU autocast, CUDA's list of FP32 operators.

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "tests/support/tensors.h"

namespace snug::fp32_reductions_test {
namespace {

using testing::same_bits;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;
using torch::kHalf;
using torch::Tensor;

constexpr AutocastOptions kFull{.fp32_reductions = true};

Tensor numbers(at::ScalarType dtype, std::vector<int64_t> sizes = {4, 8}) {
  torch::manual_seed(0);
  return torch::randn(sizes).to(dtype);
}

c10::ScalarType softmax_type() { return torch::softmax(numbers(kBFloat16), 1).scalar_type(); }

using Operator = std::pair<std::string, std::function<Tensor(const Tensor&)>>;

std::vector<Operator> operators() {
  const std::vector<int64_t> last{8};
  return {
      {"softmax", [](const Tensor& x) { return torch::softmax(x, 1); }},
      {"log_softmax", [](const Tensor& x) { return torch::log_softmax(x, 1); }},
      {"layer_norm", [last](const Tensor& x) { return torch::layer_norm(x, last); }},
      {"rms_norm", [last](const Tensor& x) { return at::rms_norm(x, last); }},
      {"group_norm", [](const Tensor& x) { return torch::group_norm(x, 2); }},
      {"batch_norm", [](const Tensor& x) { return torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false); }},
      {"sum", [](const Tensor& x) { return x.sum(); }},
      {"sum of a dimension", [](const Tensor& x) { return x.sum(1); }},
      {"mean", [](const Tensor& x) { return x.mean(); }},
      {"norm", [](const Tensor& x) { return x.norm(); }},
      {"norm of a dimension", [](const Tensor& x) { return x.norm(2, 1); }},
      {"linalg_vector_norm", [](const Tensor& x) { return at::linalg_vector_norm(x); }},
      {"logsumexp", [](const Tensor& x) { return x.logsumexp(1); }},
      {"cumsum", [](const Tensor& x) { return x.cumsum(1); }},
      {"exp", [](const Tensor& x) { return x.exp(); }},
      {"pow", [](const Tensor& x) { return x.pow(3); }},
      {"softplus", [](const Tensor& x) { return torch::softplus(x); }},
  };
}

TEST(Fp32Reductions, GiveTheBitsThatFp32InputsGive) {
  for (const auto& [name, run] : operators()) {
    for (const auto dtype : {kBFloat16, kHalf}) {
      const Tensor x = numbers(dtype);
      const Tensor expected = run(x.to(kFloat));
      const Autocast autocast(kCPU, dtype, kFull);
      EXPECT_TRUE(same_bits(run(x), expected)) << name;
    }
  }
}

TEST(Fp32Reductions, LeaveEverythingAsItIsWhereTheyAreOff) {
  const Tensor x = numbers(kBFloat16);
  const Autocast on(kCPU, kBFloat16, kFull);  // so that the kernels are there
  const Autocast off(kCPU, kBFloat16);
  for (const auto& [name, run] : operators()) {
    Tensor expected;
    {
      const Autocast without(kCPU, kBFloat16, {.enabled = false});
      expected = run(x);
    }
    EXPECT_EQ(expected.scalar_type(), kBFloat16) << name;
    EXPECT_TRUE(same_bits(run(x), expected)) << name;
  }
}

TEST(Fp32Reductions, LeaveProductsIn16Bits) {
  const Autocast autocast(kCPU, kBFloat16, kFull);
  const Tensor a = torch::ones({2, 2});
  EXPECT_EQ(torch::matmul(a, a).scalar_type(), kBFloat16);
  EXPECT_EQ(torch::matmul(torch::softmax(torch::matmul(a, a), 1), a).scalar_type(), kBFloat16);
}

TEST(Fp32Reductions, BelongToTheirRegionAndThread) {
  EXPECT_EQ(softmax_type(), kBFloat16);
  {
    const Autocast outer(kCPU, kBFloat16, kFull);
    EXPECT_EQ(softmax_type(), kFloat);
    {
      const Autocast inner(kCPU, kBFloat16);
      EXPECT_EQ(softmax_type(), kBFloat16);
    }
    {
      const Autocast off(kCPU, kBFloat16, {.enabled = false, .fp32_reductions = true});
      EXPECT_EQ(softmax_type(), kBFloat16);
    }
    {
      const Autocast other_device(torch::kCUDA, kHalf);
      EXPECT_EQ(softmax_type(), kFloat) << "it says nothing of the CPU";
    }
    EXPECT_EQ(softmax_type(), kFloat);
    c10::ScalarType elsewhere = kFloat;
    std::thread([&] {
      const Autocast autocast(kCPU, kBFloat16);
      elsewhere = softmax_type();
    }).join();
    EXPECT_EQ(elsewhere, kBFloat16);
  }
  const Autocast later(kCPU, kBFloat16);
  EXPECT_EQ(softmax_type(), kBFloat16);
}

TEST(Fp32Reductions, KeepATypeThatTheCallerNames) {
  const Autocast autocast(kCPU, kBFloat16, kFull);
  EXPECT_EQ(torch::softmax(numbers(kBFloat16), 1, kBFloat16).scalar_type(), kBFloat16);
  EXPECT_EQ(numbers(kBFloat16).sum(torch::kDouble).scalar_type(), torch::kDouble);
}

TEST(Fp32Reductions, LeaveDoublesAndIntegersAlone) {
  const Autocast autocast(kCPU, kBFloat16, kFull);
  EXPECT_EQ(numbers(torch::kDouble).exp().scalar_type(), torch::kDouble);
  EXPECT_EQ(torch::ones({3}, torch::kLong).sum().scalar_type(), torch::kLong);
}

TEST(Fp32Reductions, GiveGradientsInTheInputsType) {
  const Tensor x = numbers(kBFloat16).requires_grad_();
  const Tensor weights = numbers(kFloat);
  {
    const Autocast autocast(kCPU, kBFloat16, kFull);
    (torch::softmax(x, 1) * weights).sum().backward();
  }
  const Tensor same = x.detach().to(kFloat).requires_grad_();
  (torch::softmax(same, 1) * weights).sum().backward();
  EXPECT_TRUE(same_bits(x.grad(), same.grad().to(kBFloat16)));
}

TEST(Fp32Reductions, UpdateTheRunningStatisticsOfABatchNorm) {
  for (const auto dtype : {kFloat, kBFloat16}) {
    const Tensor x = numbers(kBFloat16, {6, 3});
    const auto statistics_after = [&](const AutocastOptions& options, bool whole) {
      torch::nn::BatchNorm1d norm(3);
      norm->to(dtype);
      const Autocast autocast(kCPU, kBFloat16, options);
      norm->forward(whole ? x.to(kFloat) : x);
      return std::vector{norm->running_mean.clone(), norm->running_var.clone()};
    };
    const auto found = statistics_after(kFull, false);
    EXPECT_FALSE(torch::equal(found[0], torch::zeros({3}, dtype)));
    if (dtype == kFloat) {
      EXPECT_TRUE(same_bits(found, statistics_after({}, true)));
    } else {
      EXPECT_TRUE(same_bits(found, statistics_after({}, false))) << "a cast of them would be written to, and lost";
    }
  }
}

// A recomputation in FP16 or BF16 of what forward did in FP32 would save other tensors, and other values.
TEST(Fp32Reductions, AreOnInARecomputationAsInForward) {
  torch::manual_seed(0);
  torch::nn::Sequential block(torch::nn::Linear(8, 8), torch::nn::LayerNorm(std::vector<int64_t>{8}),
                              torch::nn::Linear(8, 8), torch::nn::Softmax(1));
  const Tensor x = torch::randn({4, 8}, torch::requires_grad());
  const Tensor weights = torch::randn({4, 8});
  const auto gradients = [&](bool recompute) {
    for (Tensor& parameter : block->parameters()) {
      parameter.mutable_grad() = Tensor();
    }
    Tensor loss;
    {
      const Autocast autocast(kCPU, kBFloat16, kFull);
      auto forward = [block](Tensor h) mutable { return block->forward(h); };
      loss = ((recompute ? checkpoint(forward, x) : forward(x)) * weights).sum();
    }
    loss.backward();
    return testing::gradients_of(*block);
  };
  EXPECT_TRUE(same_bits(gradients(true), gradients(false)));
}

}  // namespace
}  // namespace snug::fp32_reductions_test
