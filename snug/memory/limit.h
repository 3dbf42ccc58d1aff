#pragma once
// MemoryLimit: a hard cap on live tensor memory while the guard lives, on any machine. Use it to stay within a promised
// amount, or to find out on a large machine whether a small one is enough.
//
//   {
//     snug::MemoryLimit limit(torch::kCPU, snug::Bytes::parse("1GiB"));
//     train();   // an allocation past 1 GiB throws c10::OutOfMemoryError, with live memory where it was
//   }

#include <cstdint>
#include <memory>

#include <c10/core/Device.h>

#include "snug/core/bytes.h"

namespace snug {

namespace detail {
class OperatorSeam;
}

/// Caps all live tensor memory on `device`, including memory that was alive before.
/// - CPU: the count is exact to the byte.
/// - CUDA: the cap is the caching allocator's memory fraction, so cached blocks count too. Those that are in its way
///   are given back to the driver first.
/// - Other devices, and CUDA in a build without SNUG_CUDA=ON: their allocators have no cap, so operators are looked at.
///   One throws after which more is alive than before it, and more than the limit. So memory may rise above the limit
///   by what one operator takes. Seen are operators of this thread and of backward passes that begin on it.
/// Of several limits the smallest holds.
/// Once there was a limit, a backward pass that fails, for want of memory or otherwise, leaves nothing alive. LibTorch
/// by itself keeps the gradients that were on their way until the thread's next pass.
/// Not counted: memory that is not tensors' (code, libraries, the program's own), and pinned host memory, which the
/// device's runtime allocates.
class [[nodiscard]] MemoryLimit final {
 public:
  /// Throws LimitBelowUse if more than `bytes` is taken already (the message has both numbers), and ConfigError if the
  /// device cannot be used, or if another library has replaced snug's allocator of CPU memory.
  MemoryLimit(c10::Device device, Bytes bytes);
  /// Where operators are looked at: on the thread that made the limit.
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  c10::Device device_;
  int64_t bytes_;
  std::unique_ptr<detail::OperatorSeam> seam_;  // null where the allocator keeps the limit
};

/// While it lives, limits of exactly `bytes` on `device` are off: for work that must not stop halfway, and to find out
/// how large a limit must be.
class [[nodiscard]] LimitPaused final {
 public:
  LimitPaused(c10::Device device, Bytes bytes);
  ~LimitPaused();
  LimitPaused(const LimitPaused&) = delete;
  LimitPaused& operator=(const LimitPaused&) = delete;

 private:
  c10::Device device_;
  int64_t bytes_;
};

/// Bytes of tensor memory alive on `device` now: on the CPU as requested by tensors, elsewhere as counted by the
/// device's allocator. A device without an index is the current one. Pinned host memory is not counted.
Bytes live_bytes(c10::Device device);

/// The smallest MemoryLimit that can be set now: live bytes, and on CUDA the gaps between tensors that its allocator
/// cannot give back. What it can, it gives back.
Bytes smallest_limit(c10::Device device);

}  // namespace snug
