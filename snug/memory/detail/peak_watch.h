#pragma once
// PeakWatch: the most tensor memory that was alive at once on a device since the watch was made. On the CPU it costs
// two atomic operations per allocation; on other devices it reads the device allocator's own statistics.

#include <atomic>
#include <cstdint>

#include <c10/core/Device.h>

#include "snug/memory/detail/cpu_allocator.h"

namespace snug::detail {

class PeakWatch final : private MemoryObserver {
 public:
  explicit PeakWatch(c10::Device device);
  ~PeakWatch() override;
  PeakWatch(const PeakWatch&) = delete;
  PeakWatch& operator=(const PeakWatch&) = delete;

  /// In bytes. All live tensor memory on the device counts.
  int64_t peak() const;

 private:
  void on_allocate(c10::Device device, const void* data, int64_t bytes) noexcept override;
  void on_free(c10::Device, const void*, int64_t) noexcept override {}
  void on_saved_for_backward(const void*) noexcept override {}

  c10::Device device_;
  std::atomic<int64_t> peak_;
};

}  // namespace snug::detail
