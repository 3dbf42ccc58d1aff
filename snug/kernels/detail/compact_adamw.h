#pragma once
// AdamW in seven bytes a parameter, the gradient among them: weights of 24 bits (see split_weights.h), BF16 gradients,
// and moments of a byte each. After FlashOptim (arXiv:2602.23349). On plain memory.
//
// Moments are divided by the largest magnitude of their block of 64 elements, bent by a function that gives small ones
// more room, and rounded to one of 255 (256) even steps. That is a companded code, as in telephony:
//   first moment:   code = 127 * 2 x / (1 + |x|),  x = m / scale,        scale the largest |m| of the block;
//   second moment:  code = 255 * y,                y = sqrt(v) / scale,  scale the largest sqrt(v) of the block.
// A second moment above zero gets a code above zero: with zero, a later step could be m / eps.

#include <cstdint>

#include "snug/kernels/detail/adamw_step.h"
#include "snug/kernels/detail/split_weights.h"

namespace snug::kernels {

constexpr int64_t kCompandingBlock = 64;
/// The number of scales for `count` elements.
constexpr int64_t companding_blocks(int64_t count) { return (count + kCompandingBlock - 1) / kCompandingBlock; }

/// What the step of some elements reads and writes. The scales have one element per block.
struct CompactAdamWTensors {
  BFloat16* parameter;
  int8_t* correction;
  const BFloat16* gradient;
  int8_t* exp_avg;
  uint8_t* exp_avg_sq;
  float* exp_avg_scale;
  float* exp_avg_sq_scale;

  /// The same from element `begin` on, where a block begins.
  CompactAdamWTensors from(int64_t begin) const {
    const int64_t block = begin / kCompandingBlock;
    return {parameter + begin,  correction + begin,    gradient + begin,        exp_avg + begin,
            exp_avg_sq + begin, exp_avg_scale + block, exp_avg_sq_scale + block};
  }
};

/// One step of AdamW for `count` elements; the last block may be partial. State may begin as zero bytes. Blocks do not
/// depend on each other: parts of a tensor that begin at a multiple of 64 may go to different threads.
void compact_adamw_update(const AdamWStep& step, const CompactAdamWTensors& tensors, int64_t count);

/// The conversions of compact_adamw_update for the moments. `exp_avg_sq` must not be negative.
void compand_exp_avg(const float* exp_avg, int8_t* codes, float* scales, int64_t count);
void compand_exp_avg_sq(const float* exp_avg_sq, uint8_t* codes, float* scales, int64_t count);
void expand_exp_avg(const int8_t* codes, const float* scales, float* exp_avg, int64_t count);
void expand_exp_avg_sq(const uint8_t* codes, const float* scales, float* exp_avg_sq, int64_t count);

}  // namespace snug::kernels
