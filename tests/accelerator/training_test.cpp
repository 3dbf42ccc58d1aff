// Mixed precision, optimizers and the counting of memory on an accelerator.

#include <any>
#include <limits>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/clip.h"
#include "snug/grad_scaler.h"
#include "snug/memory.h"
#include "snug/sgd.h"
#include "src/memory/backward_pass.h"
#include "src/memory/peak_watch.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/reads_during.h"
#include "tests/support/tensors.h"

namespace snug::accelerator_training_test {
namespace {

using testing::accelerator;
using testing::gradients;
using testing::leaf;
using testing::reads_during;
using testing::same_bits;
using torch::Tensor;

Tensor two_layers(const Tensor& x, const Tensor& v, const Tensor& w) {
  return x.matmul(v).tanh().matmul(w).softmax(-1);
}

TEST(TrainingOnAnAccelerator, GivesARegionTheAutocastOfItsForward) {
  const Tensor x = leaf({8, 16}), v = leaf({16, 16}), w = leaf({16, 16});
  const auto forward = [&](bool checkpointed) {
    const Autocast autocast(accelerator().type(), torch::kBFloat16);
    return checkpointed ? checkpoint(two_layers, x, v, w) : two_layers(x, v, w);
  };
  const Tensor plain = forward(false);
  EXPECT_EQ(plain.scalar_type(), torch::kFloat) << "softmax is an operator of FP32";
  EXPECT_FALSE(same_bits(plain, two_layers(x, v, w)));
  const auto expected = gradients(plain, {x, v, w});
  EXPECT_TRUE(same_bits(gradients(forward(true), {x, v, w}), expected));
}

// A pass of the program's own runs on another thread, where no region is open.
TEST(TrainingOnAnAccelerator, KeepsTheCastsOfAnOpenRegionThroughARecomputation) {
  if (!sim_device::is_present()) {
    GTEST_SKIP() << "only the simulated accelerator tells how many operators ran";
  }
  const Tensor x = leaf({8, 16}), v = leaf({16, 16}), w = leaf({16, 16});
  const auto operators_of_product = [&] {
    const double began = sim_device::virtual_seconds();
    x.matmul(v);
    return (sim_device::virtual_seconds() - began) / sim_device::kOperatorSeconds;
  };
  const Autocast autocast(accelerator().type(), torch::kBFloat16);
  EXPECT_EQ(operators_of_product(), 3) << "two casts";
  EXPECT_EQ(operators_of_product(), 1);
  checkpoint(two_layers, x, v, w).sum().backward();
  EXPECT_EQ(operators_of_product(), 1);
  detail::go_backward(checkpoint(two_layers, x, v, w).sum());
  EXPECT_EQ(operators_of_product(), 1);
}

template <typename Optimizer, typename Options>
void expect_the_steps_of_the_cpu(const Options& options) {
  const std::vector<Tensor> start{torch::randn({40, 3}), torch::randn({7})};
  const auto train = [&](c10::Device device) {
    std::vector<Tensor> parameters;
    for (const Tensor& one : start) {
      parameters.push_back(one.to(device, torch::kFloat, false, /*copy=*/true).requires_grad_());
    }
    Optimizer optimizer(parameters, options);
    for (int step = 1; step <= 3; ++step) {
      for (const Tensor& parameter : parameters) {
        parameter.mutable_grad() = parameter.detach().sin() * step;
      }
      optimizer.step();
    }
    std::vector<Tensor> result;
    for (const Tensor& parameter : parameters) {
      result.push_back(parameter.detach().cpu());
    }
    return result;
  };
  EXPECT_TRUE(testing::close_in_norm(train(accelerator())[0], train(torch::kCPU)[0], 1e-6));
  EXPECT_TRUE(testing::close_in_norm(train(accelerator())[1], train(torch::kCPU)[1], 1e-6));
}

TEST(TrainingOnAnAccelerator, StepsLikeTheCpu) {
  expect_the_steps_of_the_cpu<AdamW>(AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
  expect_the_steps_of_the_cpu<SGD>(SGDOptions{.lr = 1e-2, .momentum = 0.9});
}

// Kernels of the CPU, of which those of the simulated accelerator are made, read values of their own.
template <class F>
int64_t reads_of(const F& call) {
  const int64_t before = sim_device::host_reads();
  const int64_t seen = reads_during(call);
  return sim_device::is_present() ? sim_device::host_reads() - before : seen;
}

// Steps that are taken and one that is skipped. The host need not know which.
TEST(TrainingOnAnAccelerator, DoesNotWaitForTheDeviceInARoundOfTheScaler) {
  const Tensor p = torch::ones({2}, torch::requires_grad().device(accelerator()));
  AdamW optimizer({p});
  GradScaler scaler;
  for (const bool unscales_and_clips : {false, true}) {
    for (const float value : {1.0f, std::numeric_limits<float>::infinity(), 1.0f}) {
      const Tensor loss = torch::ones({}, accelerator());
      p.mutable_grad() = torch::full({2}, value, accelerator());
      const int64_t reads = reads_of([&] {
        scaler.scale(loss);
        if (unscales_and_clips) {
          scaler.unscale_(optimizer);
          clip_grad_norm_({p}, 1.0);
        }
        scaler.step(optimizer);
        scaler.update();
      });
      EXPECT_EQ(reads, 0);
    }
  }
}

TEST(TrainingOnAnAccelerator, CountsBytesOnAllThreads) {
  constexpr int64_t kItems = 1 << 18;
  constexpr int64_t kBytes = kItems * 4;
  const Tensor x = leaf({kItems});
  const int64_t before = live_bytes(accelerator()).count();
  MemoryMeter meter(accelerator());
  detail::PeakWatch watch(accelerator());
  Tensor y = x.exp();
  EXPECT_EQ(live_bytes(accelerator()).count(), before + kBytes);
  y.backward(torch::ones_like(y));  // its argument, and on the way to x the gradient
  y.reset();
  EXPECT_EQ(watch.peak(), before + 3 * kBytes);
  const MemoryMeter::Report report = meter.report();
  EXPECT_EQ(report.peak_bytes, 3 * kBytes);
  EXPECT_EQ(report.live_bytes, kBytes);
  EXPECT_EQ(report.activations, kBytes);
}

TEST(TrainingOnAnAccelerator, LeavesNothingBehindWhereverAnAllocationFails) {
  if (!sim_device::is_present()) {
    GTEST_SKIP() << "only the simulated accelerator fails on demand";
  }
  const std::vector<Tensor> leaves{leaf({8, 16}), leaf({16, 16}), leaf({16, 16})};
  const int64_t before = live_bytes(accelerator()).count();
  int failures = 0;
  for (bool has_failed = true; has_failed; failures += has_failed ? 1 : 0) {
    const sim_device::FailingAllocation failing(failures + 1);
    try {
      const Tensor other = leaves[0].cos();  // its gradient is there while the region's backward fails
      detail::go_backward((checkpoint(two_layers, leaves[0], leaves[1], leaves[2]) + other).sum());
    } catch (const c10::OutOfMemoryError&) {
    }
    has_failed = sim_device::FailingAllocation::has_failed();
    for (const Tensor& one : leaves) {
      one.mutable_grad().reset();
    }
    ASSERT_EQ(live_bytes(accelerator()).count(), before) << "allocation " << failures + 1;
  }
  EXPECT_GE(failures, 10);
}

}  // namespace
}  // namespace snug::accelerator_training_test
