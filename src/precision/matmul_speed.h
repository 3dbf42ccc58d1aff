#pragma once
// The measurement of measure_matmul_speed: the products, the number of repetitions, and the time limit.

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "snug/precision.h"

namespace snug::detail {

/// Products of square matrices, and a clock; tests give products of any duration.
struct MatmulProbe {
  /// One product of `size` x `size` matrices, to its end. Throws c10::Error if the device has none of that type.
  std::function<void(c10::ScalarType, int64_t size)> multiply;
  std::function<double()> now;  ///< in seconds
};

MatmulProbe probe_of(c10::Device device);

/// The first product of a type and size is not timed, because libraries load and compile then; the first training step
/// would need that time as well. All other products together end within a tenth of a second: none begins that might end
/// later, and on a CPU none that would take longer than 15 ms. The speed is 0 where there was no time, and where the
/// device has no such products.
MatmulSpeed measure(const MatmulProbe& probe, c10::DeviceType device);

}  // namespace snug::detail
