#include "src/memory/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <link.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/memory/peak_watch.h"
#include "tests/support/tensors.h"

namespace snug::cpu_allocator_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

/// What another library may put in the place of snug's allocator.
class OtherAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override { return c10::GetDefaultCPUAllocator()->allocate(n); }
  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

TEST(CpuAllocator, ThatAnotherLibraryReplacedIsAnErrorAndNotALimitThatHoldsNothing) {
  static OtherAllocator other;
  constexpr uint8_t kAboveOurs = 2;
  c10::Allocator* ours = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&other, kAboveOurs);
  const auto limit = error_of<ConfigError>([] { const MemoryLimit cap(torch::kCPU, Bytes::parse("1TiB")); });
  const auto meter = error_of<ConfigError>([] { const MemoryMeter counts; });
  const auto watch = error_of<ConfigError>([] { const detail::PeakWatch peak(torch::kCPU); });
  c10::SetCPUAllocator(ours, kAboveOurs);
  for (const auto& message : {limit, meter, watch}) {
    EXPECT_THAT(message, HasSubstr("another library has replaced"));
  }
  EXPECT_NO_THROW(MemoryLimit(torch::kCPU, Bytes::parse("1TiB")));
}

// Tensors that outlive a dlclose would be released through code that is gone.
TEST(CpuAllocator, LivesInALibraryThatIsNeverUnloaded) {
  Dl_info info;
  link_map* library = nullptr;
  void* symbol = reinterpret_cast<void*>(&live_bytes);
  ASSERT_NE(dladdr1(symbol, &info, reinterpret_cast<void**>(&library), RTLD_DL_LINKMAP), 0);
  ASSERT_THAT(info.dli_fname, HasSubstr("libsnug"));
  bool stays = false;
  for (const ElfW(Dyn)* entry = library->l_ld; entry->d_tag != DT_NULL; ++entry) {
    stays = stays || (entry->d_tag == DT_FLAGS_1 && (entry->d_un.d_val & DF_1_NODELETE) != 0);
  }
  EXPECT_TRUE(stays);
}

#if !defined(__SANITIZE_ADDRESS__)
TEST(CpuAllocator, KeepsABigBlockForTheNextTensorOfItsSize) {
  constexpr int64_t kBytes = int64_t{40} << 20;  // more than the C library would keep
  torch::full({kBytes}, 7, torch::kByte);
  const torch::Tensor next = torch::empty({kBytes}, torch::kByte);
  EXPECT_TRUE((next == 7).all().item<bool>());
}

TEST(CpuAllocator, KeepsNoMoreBesideWhatIsAliveThanTheLimitAllows) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  {
    const torch::Tensor a = torch::empty({kMiB}, torch::kByte), b = torch::empty({kMiB}, torch::kByte),
                        c = torch::empty({kMiB}, torch::kByte);
  }
  EXPECT_GE(detail::kept_cpu_bytes(), 3 * kMiB);
  const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + 2 * kMiB));
  EXPECT_LE(detail::kept_cpu_bytes(), 2 * kMiB);
  const torch::Tensor other = torch::empty({3 * kMiB / 2}, torch::kByte);
  EXPECT_LE(detail::kept_cpu_bytes(), kMiB / 2);
}
#endif

TEST(CpuAllocator, SaysThatMemoryIsOutWhereTheSystemGivesNone) {
  const Bytes before = live_bytes(torch::kCPU);
  EXPECT_THROW(torch::empty({int64_t{1} << 55}, torch::kByte), c10::OutOfMemoryError);
  EXPECT_EQ(live_bytes(torch::kCPU), before);
}

}  // namespace
}  // namespace snug::cpu_allocator_test
