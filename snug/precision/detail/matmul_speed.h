#pragma once
// How fast a device multiplies square matrices of one type.

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace snug::detail {

/// Billions of floating-point operations a second: the best of `repeats` products of `size` x `size` matrices, or of as many as fit into
/// 15 ms; of smaller ones on a CPU that would take a tenth of a second or more for one. 0 if the device has no products of that type.
double matmul_speed(c10::Device device, c10::ScalarType dtype, int64_t size, int repeats);

}  // namespace snug::detail
