#pragma once
// MemoryLimit: a hard cap on live tensor memory while the guard lives, on any machine. Use it to keep a promise, or to
// find out on a large machine what a small one would say.
//
//   {
//     snug::MemoryLimit limit(torch::kCPU, snug::Bytes::parse("1GiB"));
//     train();   // an allocation past 1 GiB throws c10::OutOfMemoryError, with live memory where it was
//   }

#include <c10/core/Device.h>

#include "snug/core/bytes.h"

namespace snug {

/// Caps all live tensor memory on `device`, what was alive before included. On CPU the count is exact to the byte and the
/// smallest of several limits holds; on CUDA it is the caching allocator's memory fraction, so cached blocks count too,
/// and of limits that lie inside each other the smallest holds.
/// A backward pass that fails, for want of memory or otherwise, leaves nothing alive once there was a limit; LibTorch by itself keeps
/// gradients that were on their way until the thread's next pass.
/// Memory that is not tensors' (code, libraries, the program's own) is outside, and so is pinned host memory, which the device's runtime
/// gives.
class [[nodiscard]] MemoryLimit final {
 public:
  /// Throws ConfigError, naming both numbers, if more than `bytes` is alive already, or if this build of snug cannot cap
  /// that kind of device, if the device cannot be used, or if another library has replaced snug's allocator of CPU memory.
  MemoryLimit(c10::Device device, Bytes bytes);
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  c10::Device device_;
  int64_t bytes_;
  double previous_fraction_ = 1.0;
};

/// Bytes of tensor memory alive on `device` now: on CPU as requested by tensors, elsewhere as the device's allocator counts. A device
/// without an index is the current one. Pinned host memory is counted nowhere.
/// Throws ConfigError if the device cannot be used, or if another library has replaced snug's allocator of CPU memory.
Bytes live_bytes(c10::Device device);

}  // namespace snug
