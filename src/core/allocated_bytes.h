#pragma once
// What tensors take of a device's memory, as its allocator counts: for sums that are compared with live bytes.

#include <cstdint>
#include <unordered_set>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// A tensor of `bytes` on `device`. On the CPU just these; elsewhere whole blocks of 512, as CUDA's allocator and those
/// that follow it give out.
inline int64_t allocated_bytes(int64_t bytes, c10::Device device) {
  constexpr int64_t kBlock = 512;
  return device.is_cpu() ? bytes : (bytes + kBlock - 1) / kBlock * kBlock;
}

/// A tensor of the shape and type of `tensor` on its device.
inline int64_t allocated_bytes(const at::Tensor& tensor) {
  return allocated_bytes(static_cast<int64_t>(tensor.nbytes()), tensor.device());
}

/// The memory of tensors, each storage once.
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
