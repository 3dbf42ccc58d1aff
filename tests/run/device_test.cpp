#include "program/run/device.h"

#include <string>

#include <c10/core/AllocatorConfig.h>
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>

namespace snug::device_test {
namespace {

namespace allocator = c10::CachingAllocator;

TEST(UseGrowingSegments, AddsToTheSettingsThatThereAreUnlessTheySaySomethingOfSegments) {
  const auto put_back =
      c10::make_scope_exit([before = allocator::getAllocatorSettings()] { allocator::setAllocatorSettings(before); });
  const auto settings_after = [](const std::string& before, c10::DeviceType device) {
    allocator::setAllocatorSettings(before);
    use_growing_segments(device);
    return allocator::getAllocatorSettings();
  };
  EXPECT_EQ(settings_after("", c10::kCUDA), "expandable_segments:True");
  EXPECT_EQ(settings_after("max_split_size_mb:128", c10::kCUDA), "max_split_size_mb:128,expandable_segments:True");
  EXPECT_EQ(settings_after("expandable_segments:False", c10::kCUDA), "expandable_segments:False");
  EXPECT_EQ(settings_after("max_split_size_mb:128", c10::kCPU), "max_split_size_mb:128");
}

}  // namespace
}  // namespace snug::device_test
