#pragma once
// Numbers for the values of tensors: equal for equal bits in equal order, almost surely different otherwise.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Hashes of tensors. The host does not wait for a device before read(), or before tensors of many bytes are to be
/// hashed on the host.
class TensorHashes {
 public:
  /// Returns the number of the hash of the tensor's values of now. Compare the hash with hashes of tensors of the same
  /// sizes and strides on the same device. Every element is read, on the device if the tensor is large and contiguous,
  /// else on the host. The hash is 0 for tensors whose bytes cannot be read (has_bytes.h).
  size_t add(const at::Tensor& tensor);
  /// All hashes so far, by number.
  const std::vector<uint64_t>& read();

 private:
  std::vector<uint64_t> hashes_;                                         // 0 for those to come
  std::vector<std::pair<size_t, std::function<at::Tensor()>>> to_come_;  // numbers, and what the host hashes
  int64_t bytes_to_come_ = 0;
};

}  // namespace snug::detail
