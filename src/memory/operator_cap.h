#pragma once
// Caps on the live bytes of devices whose allocators have no caps. The seam below autograd keeps the caps. An operator
// throws if two conditions hold after the operator:
// - More bytes are alive than before the operator.
// - More bytes are alive than the cap.
//
// So a cap is exact to an operator. Bytes that an operator takes and gives back within itself are not seen.

#include <cstdint>
#include <utility>

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

namespace snug::detail {

class DeviceMemory;

struct OperatorCap {
  const DeviceMemory* memory;
  c10::Device device;
  int64_t bytes;
};

/// From now on at most `bytes` may be alive on `device`, whose memory is `memory`; DeviceMemory::kNoLimit: any number.
void set_operator_cap(const DeviceMemory& memory, c10::Device device, int64_t bytes);

/// A scope around a kernel. Costs nothing if no cap is set.
class OperatorCapCheck final {
 public:
  /// Before the kernel: notes the live bytes.
  OperatorCapCheck();
  /// After the kernel: throws c10::OutOfMemoryError if the kernel has taken too much.
  void check() const;

 private:
  c10::SmallVector<std::pair<OperatorCap, int64_t>, 1> watched_;  // with the live bytes before the kernel
};

}  // namespace snug::detail
