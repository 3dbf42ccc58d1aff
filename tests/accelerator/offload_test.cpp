// SaveOnHost on an accelerator: to pinned memory, by streams that run as late as they may.

#include "snug/offload.h"

#include <optional>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/memory.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::accelerator_offload_test {
namespace {

using sim_device::LazyStreams;
using testing::accelerator;
using testing::same_bits;
using torch::Tensor;

constexpr int64_t kItems = 1 << 12;

Tensor input(c10::Device device, double shift) {
  return torch::linspace(-1, 1, kItems).add(shift).to(device).requires_grad_();
}

Tensor loss_of(const Tensor& x) {
  Tensor y = x;
  for (int layer = 0; layer < 6; ++layer) {
    y = (y * 1.25).sin().exp();
  }
  return y.sum();
}

Tensor gradient_in(const Tensor& x) { return torch::autograd::grad({loss_of(x)}, {x}).front(); }

Tensor offloaded_loss(const Tensor& x, SaveOnHost::Report& report, Bytes cap = Bytes::unlimited()) {
  const SaveOnHost offload({.min_bytes = Bytes(1), .cap = cap});
  const Tensor loss = loss_of(x);
  report = offload.report();
  return loss;
}

TEST(OffloadFromAnAccelerator, ComesBackWithTheSameBitsAndWithoutWaiting) {
  const std::vector<Tensor> xs{input(accelerator(), 0), input(accelerator(), 0.5)};
  std::vector<Tensor> expected;
  for (const Tensor& x : xs) {
    expected.push_back(gradient_in(x).cpu());
  }
  const LazyStreams lazy;
  for (const bool capped : {false, true}) {
    std::vector<Tensor> found;
    const int64_t reads = sim_device::host_reads();
    for (const Tensor& x : xs) {
      SaveOnHost::Report report;
      const Tensor loss = offloaded_loss(x, report, capped ? Bytes(7 * kItems * 4) : Bytes::unlimited());
      EXPECT_GE(report.bytes_out, 6 * kItems * 4);
      EXPECT_EQ(report.bytes_kept > 0, capped);
      found.push_back(torch::autograd::grad({loss}, {x}).front());
    }
    EXPECT_EQ(sim_device::host_reads(), reads);
    for (size_t i = 0; i < xs.size(); ++i) {
      EXPECT_TRUE(same_bits(found[i].cpu(), expected[i]));
    }
  }
}

TEST(OffloadFromAnAccelerator, FreesTheDeviceOfAModelsActivationsForTwoPasses) {
  for (const Bytes cap : {Bytes::unlimited(), Bytes(20 << 20)}) {
    auto model = testing::make_mlp({512, 512, 512, 512, 512, 512, 512});
    testing::move_to(*model, accelerator());
    const Tensor x = torch::rand({2048, 512}, accelerator());
    const auto gradients = [&](bool offload, int64_t& after_forward) {
      model->zero_grad();
      const int64_t before = live_bytes(accelerator()).count();
      std::optional<SaveOnHost> guard;
      if (offload) {
        guard.emplace(OffloadOptions{.cap = cap});
      }
      const Tensor loss = model->forward(x).square().mean();
      after_forward = live_bytes(accelerator()).count() - before;
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      return testing::gradients_of(*model);
    };
    int64_t plain_level = 0, level = 0;
    const auto expected = gradients(false, plain_level);
    EXPECT_TRUE(same_bits(gradients(true, level), expected));
    EXPECT_LE(level, plain_level - (4 << 20));
  }
}

// A place in pinned memory goes from one device to the other, while the first one's copy out of it has not run.
TEST(OffloadFromAnAccelerator, DoesNotMixTheMemoryOfTwoDevices) {
  if (!sim_device::is_present()) {
    GTEST_SKIP() << "needs two devices";
  }
  const Tensor x = input(sim_device::device(0), 0), y = input(sim_device::device(1), 0.5);
  const Tensor of_x = gradient_in(x).cpu(), of_y = gradient_in(y).cpu();
  const LazyStreams lazy;
  const SaveOnHost offload({.min_bytes = Bytes(1), .cap = Bytes(12 * kItems * 4)});
  const Tensor loss = loss_of(x);
  c10::impl::VirtualGuardImpl(x.device().type()).synchronizeDevice(0);  // the copies out of device 0 have run
  const Tensor from_x = torch::autograd::grad({loss}, {x}).front();
  const Tensor from_y = torch::autograd::grad({loss_of(y)}, {y}).front();
  EXPECT_TRUE(same_bits(from_y.cpu(), of_y));
  EXPECT_TRUE(same_bits(from_x.cpu(), of_x));
}

}  // namespace
}  // namespace snug::accelerator_offload_test
