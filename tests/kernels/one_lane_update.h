#pragma once
// What the kernels of a GPU do with an UpdateTable, by the CPU: the same functions, chunk by chunk and element by
// element.

#include <cstdint>

#include "src/kernels/update_table.h"

namespace snug::kernels {

void update_by_one_lane(const UpdateTable& table);

/// base^exponent as a GPU calculates it.
double power_by_one_lane(double base, uint32_t exponent);

}  // namespace snug::kernels
