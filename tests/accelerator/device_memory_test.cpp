// Counts and limits of memory on an accelerator.

#include "src/memory/device_memory.h"

#include <memory>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/allocated_bytes.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/limit_paused.h"
#include "src/memory/operator_mode.h"
#include "src/memory/peak_watch.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/tensors.h"

namespace snug::device_memory_test {
namespace {

using detail::LimitPaused;
using sim_device::device;
using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kMiB = 1 << 20;

int64_t live() { return live_bytes(device()).count(); }
Tensor tensor_of(int64_t bytes) { return torch::empty({bytes}, torch::dtype(torch::kUInt8).device(device())); }
std::unique_ptr<MemoryLimit> limit_above_live(int64_t bytes) {
  return std::make_unique<MemoryLimit>(device(), Bytes(live() + bytes));
}

// Whether the allocator keeps limits, or operators do.
class Limits : public ::testing::TestWithParam<bool> {
  sim_device::WithCap cap_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(OfAllocatorOrOperators, Limits, ::testing::Bool());

TEST_P(Limits, HoldForBlocksThatTheAllocatorHasKept) {
  tensor_of(40 * kMiB);
  const auto limit = limit_above_live(20 * kMiB);
  EXPECT_THROW(tensor_of(40 * kMiB), c10::OutOfMemoryError);
  EXPECT_NO_THROW(tensor_of(20 * kMiB));
}

TEST_P(Limits, MayEndInAnyOrder) {
  auto tight = limit_above_live(10 * kMiB);
  const auto wide = limit_above_live(30 * kMiB);
  EXPECT_THROW(tensor_of(20 * kMiB), c10::OutOfMemoryError);
  tight.reset();
  EXPECT_NO_THROW(tensor_of(20 * kMiB));
  EXPECT_THROW(tensor_of(40 * kMiB), c10::OutOfMemoryError);
}

TEST_P(Limits, EndWithTheirScopes) {
  {
    const auto limit = limit_above_live(10 * kMiB);
  }
  EXPECT_NO_THROW(tensor_of(20 * kMiB));
}

TEST_P(Limits, AreOffWhilePaused) {
  const Bytes bytes(live() + 10 * kMiB);
  const MemoryLimit limit(device(), bytes);
  {
    const LimitPaused paused(device(), bytes);
    EXPECT_NO_THROW(tensor_of(20 * kMiB));
  }
  EXPECT_THROW(tensor_of(20 * kMiB), c10::OutOfMemoryError);
}

TEST_P(Limits, BelowWhatIsAliveAreErrors) {
  const Tensor tensor = tensor_of(kMiB);
  EXPECT_THAT(error_of<ConfigError>([] { MemoryLimit(device(), Bytes(kMiB / 2)); }), HasSubstr("alive on"));
  EXPECT_NO_THROW(tensor_of(20 * kMiB));
}

TEST_P(Limits, OfOneDeviceAreNoneOfAnother) {
  const auto limit = limit_above_live(10 * kMiB);
  EXPECT_NO_THROW(torch::empty({20 * kMiB}, torch::dtype(torch::kUInt8).device(device(1))));
}

TEST_P(Limits, HoldOnThreadsOfBackward) {
  const Tensor x = tensor_of(4 * kMiB).to(torch::kFloat).requires_grad_();  // 16 MiB
  const Tensor y = x.exp().sum();
  const int64_t before = live();
  {
    const auto limit = limit_above_live(10 * kMiB);
    EXPECT_THROW(y.backward(torch::Tensor(), /*keep_graph=*/true), c10::OutOfMemoryError);
  }
  EXPECT_EQ(live(), before);
  const auto limit = limit_above_live(20 * kMiB);
  EXPECT_NO_THROW(y.backward());
}

TEST(LimitsOfOperators, NameTheLimitAndWhatWasTaken) {
  const sim_device::WithCap without(false);
  const auto limit = limit_above_live(10 * kMiB);
  EXPECT_THAT(error_of<c10::OutOfMemoryError>([] { tensor_of(20 * kMiB); }), HasSubstr("an operator took 20.00 MiB"));
}

TEST(LimitsOfOperators, LetPassWhatTakesNothing) {
  const sim_device::WithCap without(false);
  const Bytes bytes(live() + 10 * kMiB);
  const MemoryLimit limit(device(), bytes);
  std::optional<LimitPaused> paused(std::in_place, device(), bytes);
  const Tensor tensor = tensor_of(20 * kMiB);
  paused.reset();
  EXPECT_NO_THROW(tensor.fill_(1));
  EXPECT_THROW(tensor_of(1), c10::OutOfMemoryError);
}

// The scope goes on seeing operators.
TEST(LimitsOfOperators, MayEndBeforeScopesThatBeganWithin) {
  class Count final : public detail::OperatorPolicy {
   public:
    void call(const detail::OperatorCall& call, detail::Stack& stack) override {
      ++calls;
      call.proceed(stack);
    }
    int calls = 0;
  };
  const sim_device::WithCap without(false);
  Count count;
  auto limit = limit_above_live(10 * kMiB);
  {
    const detail::OperatorScope scope(count);
    limit.reset();
    tensor_of(20 * kMiB);
    EXPECT_EQ(count.calls, 1);
  }
  tensor_of(20 * kMiB);
  EXPECT_EQ(count.calls, 1);
}

TEST(DeviceMemory, AWatchInsideAnotherLeavesItsPeak) {
  const int64_t before = live();
  const detail::PeakWatch outer(device());
  tensor_of(4 * kMiB);
  const detail::PeakWatch other(device(1));
  {
    const detail::PeakWatch inner(device());
    tensor_of(kMiB);
    EXPECT_EQ(inner.peak(), before + kMiB);
    EXPECT_EQ(outer.peak(), before + 4 * kMiB);
  }
  tensor_of(2 * kMiB);
  EXPECT_EQ(outer.peak(), before + 4 * kMiB);
}

TEST(DeviceMemory, AMeterCountsInBlocks) {
  const MemoryMeter meter(device());
  const Tensor tensor = torch::empty({130}, device());
  EXPECT_EQ(meter.report().live_bytes, 1024);
  EXPECT_EQ(detail::allocated_bytes(tensor), 1024);
}

TEST(DeviceMemory, AMeterPrintsNothingWhereTensorsOfTheCpuEnd) {
  std::vector<Tensor> older;
  for (int i = 0; i < 1001; ++i) {  // LibTorch warns of every thousandth
    older.push_back(torch::empty({1}));
  }
  ::testing::internal::CaptureStderr();
  const MemoryMeter meter(device());
  older.clear();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(DeviceMemory, AnOptimizersStateIsForetold) {
  const auto check = [](auto make) {
    std::vector<Tensor> parameters;
    for (const int64_t size : {1, 3, 129, 1000}) {
      parameters.push_back(torch::ones({size}, device()).set_requires_grad(true));
      parameters.back().mutable_grad() = torch::ones({size}, device());
    }
    const std::unique_ptr<torch::optim::Optimizer> optimizer = make(parameters);
    const int64_t expected = detail::state_bytes_to_come(*optimizer);
    const int64_t before = live();
    optimizer->step();
    EXPECT_EQ(live() - before, expected);
  };
  check([](auto& parameters) { return std::make_unique<torch::optim::AdamW>(parameters); });
  check([](auto& parameters) { return std::make_unique<AdamW>(parameters); });
}

}  // namespace
}  // namespace snug::device_memory_test
