#pragma once
// AdamW whose two moments take a byte each instead of four: 8-bit Optimizers via Block-wise Quantization (Dettmers et al. 2022,
// arXiv:2110.02861). On plain memory.
//
// Each block of 256 elements is divided by its largest magnitude, kept in FP32, and rounded to the nearest value of the dynamic map, which
// is finer near zero: see detail/dynamic_map.h. Bytes mean what they mean in bitsandbytes, with one difference. A second moment above zero
// never becomes zero, but at least the smallest value, 5.5e-7 of the largest in its block. Were it zero,
// the next update could be m / eps: an element whose gradient is 4,000 times smaller than another's of its block leaps by hundreds of
// thousands of steps when its gradient ends. Rounded up, it takes somewhat smaller steps than in FP32.

#include <cstdint>

#include "snug/kernels/adamw_step.h"

namespace snug::kernels {

constexpr int64_t kQuantizationBlock = 256;
/// How many maxima `count` elements need.
constexpr int64_t quantization_blocks(int64_t count) { return (count + kQuantizationBlock - 1) / kQuantizationBlock; }

/// One step of AdamW for `count` elements, the last block of which may be partial. The maxima have one element per block. A moment is zero
/// where its block's maximum is zero, so that state may begin as zero bytes. Blocks do not depend on each other: give parts of a tensor
/// that begin at a multiple of 256 to different threads.
void adamw8bit_update(const AdamWStep& step, float* parameter, const float* gradient, uint8_t* exp_avg,
                      uint8_t* exp_avg_sq, float* exp_avg_max, float* exp_avg_sq_max, int64_t count);

/// The two dynamic maps: for the first moment, and, without negative values, for the second.
enum class DynamicCode { kSigned, kUnsigned };

/// What adamw8bit_update does with a moment after the update, and before it. Values for kUnsigned must not be negative.
void quantize(DynamicCode code, const float* values, uint8_t* codes, float* maxima, int64_t count);
void dequantize(DynamicCode code, const uint8_t* codes, const float* maxima, float* values, int64_t count);

}  // namespace snug::kernels
