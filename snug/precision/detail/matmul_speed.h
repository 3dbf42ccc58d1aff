#pragma once
// How measure_matmul_speed measures: which products, how often, and when enough time was spent.

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "snug/precision/precision.h"

namespace snug::detail {

/// Products of square matrices, and a clock; tests give such as take what time they like.
struct MatmulProbe {
  /// One product of `size` x `size` matrices, to its end. Throws c10::Error where there are none of that type.
  std::function<void(c10::ScalarType, int64_t size)> multiply;
  std::function<double()> now;  ///< in seconds
};

MatmulProbe probe_of(c10::Device device);

/// The first product of a type and size is not timed: libraries load and compile then. Of the others none begins that might not end within
/// a tenth of a second, all together: on a CPU none is begun that would take longer than 15 ms. So all is over by then, besides that start,
/// which the first training step would take as well. What there was no time for is 0, as is what the device does not have.
MatmulSpeed measure(const MatmulProbe& probe, c10::DeviceType device);

}  // namespace snug::detail
