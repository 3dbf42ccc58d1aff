#pragma once
// AdamW whose two moments take a byte each instead of four: 8-bit Optimizers via Block-wise Quantization (Dettmers et
// al. 2022, arXiv:2110.02861). On plain memory.
//
// Each block of 256 elements is divided by its largest magnitude, kept in FP32, and rounded to the nearest value of the
// dynamic map, which is finer near zero: see dynamic_map.h. Bytes have the same meaning as in bitsandbytes, with
// one difference: a second moment above zero never becomes zero, but at least the smallest value, 5.5e-7 of the largest
// in its block. With zero, the next update could be m / eps: an element whose gradient is 4,000 times smaller than
// another's in its block would move by hundreds of thousands of steps when its gradient ends. Rounded up, it takes
// somewhat smaller steps than in FP32.

#include <cstdint>

#include "src/kernels/adamw_step.h"
#include "src/kernels/master_adamw.h"

namespace snug::kernels {

constexpr int64_t kQuantizationBlock = 256;
/// The number of maxima for `count` elements.
constexpr int64_t quantization_blocks(int64_t count) { return (count + kQuantizationBlock - 1) / kQuantizationBlock; }

/// The moments of some elements. The maxima have one element per block. A moment is zero if its block's maximum is
/// zero, so the state may begin as zero bytes.
struct EightBitMoments {
  uint8_t* exp_avg;
  uint8_t* exp_avg_sq;
  float* exp_avg_max;
  float* exp_avg_sq_max;

  /// The same from element `begin` on, where a block begins.
  EightBitMoments from(int64_t begin) const {
    const int64_t block = begin / kQuantizationBlock;
    return {exp_avg + begin, exp_avg_sq + begin, exp_avg_max + block, exp_avg_sq_max + block};
  }
};

/// One step of AdamW for `count` elements; the last block may be partial. Blocks do not depend on each other: parts of
/// a tensor that begin at a multiple of 256 may go to different threads.
void adamw8bit_update(const AdamWStep& step, float* parameter, const float* gradient, const EightBitMoments& state,
                      int64_t count);
/// The same for weights of 24 bits (see split_weights_simd.h) and BF16 gradients.
void adamw8bit_update(const AdamWStep& step, BFloat16* parameter, int8_t* correction, const BFloat16* gradient,
                      const EightBitMoments& state, int64_t count);

}  // namespace snug::kernels
