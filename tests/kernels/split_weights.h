#pragma once
// Weights of 24 bits from and to memory, as the kernels read and write them: see split_weights_simd.h.

#include <cstdint>

#include "src/kernels/master_adamw.h"

namespace snug::kernels {

void split_weights(const float* weights, BFloat16* rounded, int8_t* correction, int64_t count);
void join_weights(const BFloat16* rounded, const int8_t* correction, float* weights, int64_t count);

}  // namespace snug::kernels
