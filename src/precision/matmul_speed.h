#pragma once
// The speed of matrix products by type, and the choice of a precision by the speed: choose_precision() of
// snug/precision.h.

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "snug/precision.h"

namespace snug::detail {

/// Billions of floating-point operations a second in square matrix products on the device. 0: the device has no
/// products of that type, or is too slow to measure in time.
struct MatmulSpeed {
  double float32 = 0;
  double bfloat16 = 0;
  double float16 = 0;        ///< a small product, so that a CPU without FP16 instructions answers in milliseconds
  double float32_small = 0;  ///< the same small product, to compare float16 with
};
/// Takes less than 100 ms, beside the time that libraries need to start. Without a measurement, the first training step
/// needs the same time to start libraries.
MatmulSpeed measure_matmul_speed(c10::Device device);

/// See choose_precision().
Precision precision_for(const MatmulSpeed& speed, c10::DeviceType device);

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
