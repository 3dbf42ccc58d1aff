#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/peak_watch.h"
#include "tests/support/tensors.h"

namespace snug::limit_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kMiB = 1 << 20;

int64_t live() { return live_bytes(torch::kCPU).count(); }
Bytes above_now(int64_t bytes) { return Bytes(live() + bytes); }
Tensor tensor_of(int64_t bytes) { return torch::empty({bytes}, torch::kUInt8); }

TEST(LiveBytes, CountsWhatTensorsAskForToTheByte) {
  const int64_t before = live();
  {
    const Tensor a = tensor_of(1);
    EXPECT_EQ(live(), before + 1);
    const Tensor b = torch::zeros({3, 5}, torch::kDouble);
    EXPECT_EQ(live(), before + 1 + 120);
    const Tensor view = b.slice(0, 0, 2);
    EXPECT_EQ(live(), before + 1 + 120);
    const Tensor nothing = torch::empty({0});
    EXPECT_EQ(live(), before + 1 + 120);
  }
  EXPECT_EQ(live(), before);
}

TEST(LiveBytes, KeepsTheAlignmentThatVectorInstructionsNeed) {
  for (int64_t bytes = 1; bytes < 300; bytes += 7) {
    const Tensor tensor = tensor_of(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 64, 0u) << bytes;
  }
}

TEST(LiveBytes, FollowsAStorageThatIsResized) {
  const int64_t before = live();
  Tensor tensor = tensor_of(100);
  tensor.fill_(7);
  tensor.resize_({1000});
  EXPECT_EQ(live(), before + 1000);
  EXPECT_EQ(tensor[99].item<uint8_t>(), 7);
  tensor.reset();
  EXPECT_EQ(live(), before);
}

TEST(LiveBytes, IsRightAfterManyThreadsAllocateAndRelease) {
  const int64_t before = live();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      for (int64_t n = 1; n < 2000; ++n) {
        const Tensor a = tensor_of(n);
        const Tensor b = tensor_of(3 * n + i);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(live(), before);
}

TEST(MemoryLimit, ThrowsOutOfMemoryPastItAndLeavesLiveBytesWhereTheyWere) {
  const MemoryLimit limit(torch::kCPU, above_now(1000));
  const Tensor fits = tensor_of(900);
  const int64_t before = live();
  const auto message = error_of<c10::OutOfMemoryError>([] { tensor_of(101); });
  EXPECT_THAT(message, HasSubstr("MemoryLimit: an allocation of 101 B on cpu"));
  EXPECT_EQ(live(), before);
  EXPECT_NO_THROW(tensor_of(100)) << "exactly up to the limit is allowed";
}

TEST(MemoryLimit, EndsWithItsScope) {
  {
    const MemoryLimit limit(torch::kCPU, above_now(10));
    EXPECT_THROW(tensor_of(11), c10::OutOfMemoryError);
  }
  EXPECT_NO_THROW(tensor_of(kMiB));
}

TEST(MemoryLimit, OfNestedLimitsTheSmallestHolds) {
  const MemoryLimit outer(torch::kCPU, above_now(1000));
  {
    const MemoryLimit tighter(torch::kCPU, above_now(100));
    EXPECT_THROW(tensor_of(101), c10::OutOfMemoryError);
    const MemoryLimit wider(torch::kCPU, above_now(10000));
    EXPECT_THROW(tensor_of(101), c10::OutOfMemoryError);
    const MemoryLimit none(torch::kCPU, Bytes::unlimited());
    EXPECT_THROW(tensor_of(101), c10::OutOfMemoryError);
  }
  EXPECT_NO_THROW(tensor_of(1000));
  EXPECT_THROW(tensor_of(1001), c10::OutOfMemoryError);
}

TEST(MemoryLimit, TwoEqualLimitsAreTwoLimits) {
  const Bytes same = above_now(100);
  const MemoryLimit outer(torch::kCPU, same);
  {
    const MemoryLimit inner(torch::kCPU, same);
  }
  EXPECT_THROW(tensor_of(101), c10::OutOfMemoryError);
}

TEST(MemoryLimit, ThatIsExceededAlreadyIsAnErrorWithBothNumbers) {
  const Tensor tensor = tensor_of(2 * kMiB);
  const auto message = error_of<ConfigError>([] { const MemoryLimit limit(torch::kCPU, Bytes(kMiB)); });
  EXPECT_THAT(message, HasSubstr(Bytes(live()).str()));
  EXPECT_THAT(message, HasSubstr("1.00 MiB"));
  EXPECT_NO_THROW(tensor_of(kMiB)) << "the limit that was refused must not hold";
}

TEST(MemoryLimit, HoldsOnAllThreads) {
  const MemoryLimit limit(torch::kCPU, above_now(1000));
  bool thrown = false;
  std::thread([&] {
    try {
      tensor_of(1001);
    } catch (const c10::OutOfMemoryError&) {
      thrown = true;
    }
  }).join();
  EXPECT_TRUE(thrown);
}

TEST(MemoryLimit, StopsAnOperatorInTheMiddleAndLeavesItsOperandsAlone) {
  const Tensor a = torch::ones({1000});
  const Tensor sum = torch::zeros({1000});
  const MemoryLimit limit(torch::kCPU, above_now(5000));  // one temporary of 4,000 bytes, not two
  EXPECT_THROW(sum.add_((a + 1) * 2 + (a + 3)), c10::OutOfMemoryError);
  EXPECT_TRUE(torch::equal(sum, torch::zeros({1000})));
  EXPECT_TRUE(torch::equal(a, torch::ones({1000})));
}

// oneDNN takes scratch memory and repacked weights through torch's raw allocator.
TEST(MemoryLimit, AConvolutionWorksUnderItAndFailsCleanlyPastIt) {
  torch::manual_seed(0);
  auto convolution = torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 3).padding(1));
  const Tensor x = torch::randn({4, 8, 32, 32});
  const auto run = [&] {
    convolution->zero_grad();
    convolution->forward(x).pow(2).sum().backward();
    return convolution->weight.grad().clone();
  };
  const Tensor expected = run();
  convolution->zero_grad();
  const int64_t before = live();
  {
    const MemoryLimit limit(torch::kCPU, above_now(64 * kMiB));
    EXPECT_TRUE(testing::same_bits(run(), expected));
  }
  convolution->zero_grad();
  ASSERT_EQ(live(), before);
  {
    const MemoryLimit limit(torch::kCPU, above_now(100 << 10));  // the output alone needs 256 KiB
    EXPECT_THROW(run(), c10::OutOfMemoryError);
  }
  convolution->zero_grad();
  EXPECT_EQ(live(), before);
  EXPECT_TRUE(testing::same_bits(run(), expected));
}

TEST(FailAllocationAfter, FailsThatOneAllocationAndNoOther) {
  const int64_t before = live();
  detail::fail_allocation_after(3);
  const Tensor a = tensor_of(8);
  const Tensor b = tensor_of(8);
  EXPECT_THROW(tensor_of(8), c10::OutOfMemoryError);
  const Tensor c = tensor_of(8);
  EXPECT_EQ(live(), before + 24);
  EXPECT_EQ(detail::fail_allocation_after(0), 0);
}

TEST(FailAllocationAfter, CanBeTakenBackAndSaysWhatWasLeft) {
  detail::fail_allocation_after(5);
  tensor_of(1);
  EXPECT_EQ(detail::fail_allocation_after(0), 4);
  for (int i = 0; i < 10; ++i) {
    EXPECT_NO_THROW(tensor_of(1));
  }
}

TEST(PeakWatch, SeesTheMostThatWasAliveAtOnceWithWhatWasThereBefore) {
  const Tensor old = tensor_of(500);
  const int64_t before = live();
  const detail::PeakWatch watch{torch::kCPU};
  EXPECT_EQ(watch.peak(), before);
  {
    const Tensor a = tensor_of(1000);
  }
  const Tensor b = tensor_of(10);
  EXPECT_EQ(watch.peak(), before + 1000);
  const detail::PeakWatch later{torch::kCPU};
  EXPECT_EQ(later.peak(), before + 10);
}

}  // namespace
}  // namespace snug::limit_test
