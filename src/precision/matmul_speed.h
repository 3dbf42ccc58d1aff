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
  /// One product of `size` x `size` matrices, to the end. Throws c10::Error if the device has no product of the type.
  std::function<void(c10::ScalarType, int64_t size)> multiply;
  std::function<double()> now;  ///< in seconds
};

MatmulProbe probe_of(c10::Device device);

/// The first product of a type and size is not timed, because libraries load and compile during the first product;
/// otherwise the first training step needs the same time. All other products together end within a tenth of a second:
/// no product begins that might end later, and on a CPU no product that takes longer than 15 ms. The speed is 0 if no
/// time was left, and if the device has no such products.
MatmulSpeed measure(const MatmulProbe& probe, c10::DeviceType device);

}  // namespace snug::detail
