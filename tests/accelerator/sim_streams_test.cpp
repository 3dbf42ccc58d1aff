// The simulated accelerator's streams: do tests on them find what they are for?

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/sim_device/sim_device.h"
#include "tests/support/tensors.h"

namespace snug::sim_streams_test {
namespace {

using sim_device::device;
using testing::same_bits;
using torch::Tensor;

Tensor values_of(const Tensor& tensor) { return tensor.to(torch::kCPU); }

// Writes through a side stream and reads on the host what it wrote.
Tensor doubled_by_side_stream(bool waits) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const c10::Stream main = guard.getStream(device()), side = guard.getStreamFromGlobalPool(device());
  const Tensor x = torch::ones({4}, device());
  const Tensor y = x * 3;
  if (waits) {
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(main);
    event.block(side);
  }
  const c10::StreamGuard on_side(side);
  return values_of(y * 2);
}

TEST(LazyStreams, ShowThatAnEventIsMissing) {
  EXPECT_TRUE(same_bits(doubled_by_side_stream(false), torch::full({4}, 6.0f))) << "unnoticed";
  const sim_device::LazyStreams lazy;
  EXPECT_TRUE(doubled_by_side_stream(false).isnan().all().item<bool>());
  EXPECT_TRUE(same_bits(doubled_by_side_stream(true), torch::full({4}, 6.0f)));
}

// The memory of a tensor that a side stream still reads is given to another one.
Tensor copied_while_freed(bool recorded) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const c10::Stream main = guard.getStream(device()), side = guard.getStreamFromGlobalPool(device());
  Tensor x = torch::ones({4}, device());
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(main);
  event.block(side);
  Tensor copy;
  {
    const c10::StreamGuard on_side(side);
    copy = x * 2;
  }
  if (recorded) {
    x.record_stream(side);
  }
  x.reset();
  const Tensor next = torch::full({4}, 5.0f, device());
  guard.synchronizeStream(main);
  const c10::StreamGuard on_side(side);
  return values_of(copy);
}

TEST(LazyStreams, ShowThatMemoryIsReusedTooEarly) {
  const sim_device::LazyStreams lazy;
  EXPECT_TRUE(same_bits(copied_while_freed(false), torch::full({4}, 10.0f)));
  EXPECT_TRUE(same_bits(copied_while_freed(true), torch::full({4}, 2.0f)));
}

TEST(LazyStreams, TakeTheTimesThatAreKnown) {
  const sim_device::LazyStreams lazy;
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const auto now = [&](const c10::Stream& stream) {
    c10::Event event(c10::DeviceType::PrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
    event.record(stream);
    return event;
  };
  const c10::Stream main = guard.getStream(device()), side = guard.getStreamFromGlobalPool(device());
  guard.synchronizeDevice(0);
  const Tensor host = torch::ones({1 << 16}, torch::TensorOptions().pinned_memory(true));
  const c10::Event start = now(main);
  const Tensor x = torch::ones({1 << 16}, device());  // one operator
  const c10::Event filled = now(main);
  Tensor copied = torch::empty({1 << 16}, device());
  {
    const c10::StreamGuard on_side(side);
    copied.copy_(host, /*non_blocking=*/true);
  }
  const c10::Event arrived = now(side);
  arrived.block(main);
  x.add_(copied);
  const c10::Event end = now(main);
  guard.synchronizeDevice(0);  // LibTorch's events are read when they have passed
  const double copy = (1 << 18) / sim_device::kBytesPerSecond;
  EXPECT_EQ(start.elapsedTime(filled), sim_device::kOperatorSeconds * 1e3);
  EXPECT_EQ(start.elapsedTime(end), (copy + sim_device::kOperatorSeconds) * 1e3) << "the two ran side by side";
  EXPECT_TRUE(same_bits(values_of(x), torch::full({1 << 16}, 2.0f)));
}

}  // namespace
}  // namespace snug::sim_streams_test
