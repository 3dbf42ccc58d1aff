#pragma once
// Weights of 24 bits in two tensors: the nearest BF16 number, which the model computes with, and a byte that says how
// far the weight is from it. After FlashOptim's weight splitting (arXiv:2602.23349), in integer arithmetic: no bit of
// the 24 is lost. On plain memory.

#include <cstdint>

#include "snug/kernels/detail/master_adamw.h"

namespace snug::kernels {

/// The upper 24 bits of an FP32 number, rounded to nearest: 15 bits of a fraction, so that
/// rounding moves a weight by 2^-16 of itself at most. Weight i is rounded[i] plus
/// correction[i] 256ths of the distance to the next BF16 number, at most half of that distance. Halves are rounded away
/// from zero. A correction of zeros belongs to weights that are BF16 numbers.
void split_weights(const float* weights, BFloat16* rounded, int8_t* correction, int64_t count);
/// Any two of them make a number: where the BF16 part was replaced by another one, the correction moves it by half a
/// unit at most, and never beyond zero.
void join_weights(const BFloat16* rounded, const int8_t* correction, float* weights, int64_t count);

}  // namespace snug::kernels
