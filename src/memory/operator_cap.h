#pragma once
// Caps on the live bytes of devices whose allocators have none. The seam below autograd keeps them: an operator after
// which more is alive than before it, and more than a cap, throws. So they are exact to an operator. Bytes that it
// takes and gives back within itself are not seen.

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

namespace snug::detail {

class DeviceMemory;

/// From now on at most `bytes` may be alive on `device`, whose memory is `memory`; DeviceMemory::kNoLimit: any number.
void set_operator_cap(const DeviceMemory& memory, c10::Device device, int64_t bytes);

/// Around a kernel. Costs nothing where no cap is set.
class OperatorCapCheck final {
 public:
  /// Before it: notes what is alive.
  OperatorCapCheck();
  /// After it: throws c10::OutOfMemoryError where it has taken too much.
  void check() const;

 private:
  struct Watched {
    const DeviceMemory* memory;
    c10::Device device;
    int64_t cap;
    int64_t before;
  };
  c10::SmallVector<Watched, 1> watched_;
};

}  // namespace snug::detail
