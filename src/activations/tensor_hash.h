#pragma once
// Numbers for the values of tensors: equal for equal bits in equal order, almost surely different otherwise.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace snug::detail {

/// Hashes of tensors. A device computes the hashes of the device's tensors and keeps the hashes, so that the host waits
/// for the device once, in read().
class TensorHashes {
 public:
  /// Reads every element on the current stream, and returns the number of the hash. Compare the hash with hashes of
  /// tensors of the same sizes and strides on the same device. The hash is 0 for tensors whose bytes cannot be read
  /// (has_bytes.h). Takes a few copies of 2 MiB on the device, in turn.
  size_t add(const at::Tensor& tensor);
  /// All hashes so far, by number. Waits for each stream on which a hash was computed.
  const std::vector<uint64_t>& read();

 private:
  // Hashes that were computed on one stream.
  struct Table {
    c10::Stream stream;
    at::Tensor factors;           // for small tensors
    at::Tensor values;            // on the device
    std::vector<size_t> numbers;  // of the values
  };

  Table& table_on(const c10::Stream& stream);

  std::vector<uint64_t> hashes_;  // those in a table: 0 so far
  std::vector<Table> tables_;
};

}  // namespace snug::detail
