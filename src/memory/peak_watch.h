#pragma once
// PeakWatch: the most tensor memory alive at once on a device since the watch was made. Several watches may be alive.

#include <cstdint>

#include <c10/core/Device.h>

namespace snug::detail {

class PeakWatch final {
 public:
  explicit PeakWatch(c10::Device device);
  ~PeakWatch();
  PeakWatch(const PeakWatch&) = delete;
  PeakWatch& operator=(const PeakWatch&) = delete;

  /// The peak in bytes. All live tensor memory on the device counts.
  int64_t peak() const;

 private:
  c10::Device device_;
  int64_t earlier_ = 0;  // the peak until the latest watch of this device began; guarded by the mutex of all watches
};

}  // namespace snug::detail
