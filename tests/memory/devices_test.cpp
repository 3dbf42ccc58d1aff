#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/limit_below_use.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/peak_watch.h"
#include "tests/support/tensors.h"

// What holds on every kind of device: on the CPU and, where its program has one, on the accelerator.

namespace snug::devices_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kMiB = 1 << 20;  // no device's allocator rounds it

class OnDevice : public ::testing::TestWithParam<c10::DeviceType> {
 protected:
  static c10::Device device() { return GetParam(); }  // without an index
  static int64_t live() { return live_bytes(device()).count(); }
  static Tensor tensor_of(int64_t bytes) { return torch::empty({bytes}, torch::dtype(torch::kUInt8).device(device())); }
};

// First, so that with --gtest_filter nothing has used the device yet.
TEST_P(OnDevice, LiveBytesNeedNoEarlierUseOfTheDevice) {
  const int64_t before = live();
  const Tensor tensor = tensor_of(kMiB);
  EXPECT_EQ(live(), before + kMiB);
}

TEST_P(OnDevice, AWiderLimitInsideATighterOneDoesNotWidenIt) {
  if (GetParam() != torch::kCPU) {
    try {
      const MemoryLimit probe(device(), Bytes(live() + 100 * kMiB));
    } catch (const ConfigError& error) {
      GTEST_SKIP() << error.what();  // built without CUDA's headers
    }
  }
  {
    const MemoryLimit tight(device(), Bytes(live() + 100 * kMiB));
    {
      const MemoryLimit wide(device(), Bytes(live() + 2000 * kMiB));
      EXPECT_THROW(tensor_of(500 * kMiB), c10::OutOfMemoryError);
    }
    EXPECT_THROW(tensor_of(500 * kMiB), c10::OutOfMemoryError);
    EXPECT_NO_THROW(tensor_of(10 * kMiB));
  }
  EXPECT_NO_THROW(tensor_of(500 * kMiB));
}

TEST_P(OnDevice, ALimitCannotBeBelowWhatIsTaken) {
  const Tensor tensor = tensor_of(3 * kMiB);
  const Bytes smallest = MemoryLimit::smallest(device());
  EXPECT_GE(smallest.count(), live());
  EXPECT_TRUE(smallest.count() == live() || GetParam() == torch::kCUDA) << "only CUDA's allocator has gaps";
  const auto limit_at = [&](int64_t bytes) { const MemoryLimit limit(device(), Bytes(bytes)); };
  try {
    limit_at(smallest.count());
  } catch (const detail::LimitBelowUse& error) {
    ADD_FAILURE() << error.what();
  } catch (const ConfigError& error) {
    GTEST_SKIP() << error.what();  // built without CUDA's headers
  }
  EXPECT_THROW(limit_at(smallest.count() - 1), detail::LimitBelowUse);
}

TEST_P(OnDevice, AMeterCountsTensorsOfTheCurrentDevice) {
  const MemoryMeter meter{device()};
  const Tensor tensor = tensor_of(kMiB);
  EXPECT_EQ(meter.report().live_bytes, kMiB);
  EXPECT_EQ(meter.report().outputs, kMiB);
}

TEST_P(OnDevice, AMeterCountsNoOtherDevice) {
  const c10::Device other = GetParam() == torch::kCPU ? c10::Device(torch::kCUDA, 0) : c10::Device(GetParam(), 1);
  const MemoryMeter meter{device()};
  const int block = 0;
  detail::report_allocation(other, &block, 1000);
  EXPECT_EQ(meter.report().live_bytes, 0);
  detail::report_free(other, &block, 1000);
  EXPECT_EQ(meter.report().live_bytes, 0);
}

TEST_P(OnDevice, APeakWatchSeesTheMostThatWasAliveAtOnce) {
  const int64_t before = live();
  const detail::PeakWatch watch{device()};
  {
    const Tensor tensor = tensor_of(kMiB);
  }
  EXPECT_EQ(watch.peak(), before + kMiB);
}

std::vector<c10::DeviceType> device_types() {
  std::vector<c10::DeviceType> types{torch::kCPU};
  if (const auto accelerator = at::getAccelerator()) {
    types.push_back(*accelerator);
  }
  return types;
}

INSTANTIATE_TEST_SUITE_P(Devices, OnDevice, ::testing::ValuesIn(device_types()),
                         [](const auto& parameter) { return c10::DeviceTypeName(parameter.param); });

TEST(Devices, TheCpuMayHaveAnIndex) {
  const MemoryMeter meter{c10::Device(torch::kCPU, 0)};
  const Tensor tensor = torch::empty({1000});
  EXPECT_EQ(meter.report().live_bytes, 4000);
}

TEST(Devices, ThatAreNotThereAreAnErrorThatNamesThem) {
  if (torch::cuda::is_available()) {
    GTEST_SKIP() << "there is a GPU";
  }
  EXPECT_THAT(error_of<ConfigError>([] { live_bytes(torch::kCUDA); }), HasSubstr("device cuda cannot be used"));
  EXPECT_THAT(error_of<ConfigError>([] { MemoryLimit(torch::kCUDA, Bytes(kMiB)); }), HasSubstr("device cuda"));
  EXPECT_THAT(error_of<ConfigError>([] { MemoryMeter{torch::kCUDA}; }), HasSubstr("device cuda"));
}

}  // namespace
}  // namespace snug::devices_test
