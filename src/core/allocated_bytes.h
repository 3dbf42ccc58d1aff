#pragma once
// The bytes that tensors take of a device's memory, as counted by the device's allocator. The sums can be compared with
// live bytes.

#include <cstdint>
#include <unordered_set>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// The bytes taken by a tensor of `bytes` on `device`:
/// - on the CPU, `bytes`;
/// - elsewhere, whole blocks of 512 bytes, as given out by CUDA's allocator and by allocators that follow CUDA's
///   example.
inline int64_t allocated_bytes(int64_t bytes, c10::Device device) {
  constexpr int64_t kBlock = 512;
  return device.is_cpu() ? bytes : (bytes + kBlock - 1) / kBlock * kBlock;
}

/// The bytes taken by a tensor with the shape, type and device of `tensor`.
inline int64_t allocated_bytes(const at::Tensor& tensor) {
  return allocated_bytes(static_cast<int64_t>(tensor.nbytes()), tensor.device());
}

/// The memory taken by tensors. Each storage counts once.
class AllocatedBytes {
 public:
  void add(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      count_ += allocated_bytes(static_cast<int64_t>(tensor.storage().nbytes()), tensor.device());
    }
  }
  int64_t count() const { return count_; }

 private:
  std::unordered_set<const void*> seen_;
  int64_t count_ = 0;
};

}  // namespace snug::detail
