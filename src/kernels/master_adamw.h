#pragma once
// AdamW for parameters of 16 bits, in one pass over memory: with FP32 masters, as in Mixed Precision Training
// (Micikevicius et al. 2018, arXiv:1710.03740), or, for BF16 alone, with stochastic rounding. On plain memory.

#include <cstdint>

#include "src/kernels/adamw_step.h"

namespace snug::kernels {

/// The bits of an IEEE half, and of a bfloat16: what at::Half and at::BFloat16 hold.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

/// One step of AdamW for `count` elements. Updates `master` and the moments in FP32, and writes the master, rounded to
/// nearest even, to `parameter`. The gradient is backward's, in 16 bits. Elements do not depend on each other.
void master_adamw_update(const AdamWStep& step, float* master, Float16* parameter, const Float16* gradient,
                         float* exp_avg, float* exp_avg_sq, int64_t count);
void master_adamw_update(const AdamWStep& step, float* master, BFloat16* parameter, const BFloat16* gradient,
                         float* exp_avg, float* exp_avg_sq, int64_t count);

/// The source of the random numbers. They depend on these values and on an element's index in its tensor, not on
/// threads or on the order in which elements are updated.
struct RandomKey {
  uint64_t seed = 0;    ///< give each tensor its own
  uint64_t step = 0;    ///< the number of the update
  uint64_t offset = 0;  ///< index of the first element
};

/// One step of AdamW for `count` BF16 elements, in FP32, with FP32 moments. The result is rounded to one of its two
/// neighbours at random, with the probability that makes the mean right. Steps below BF16's resolution of 2^-8
/// therefore count on average; rounding to nearest would drop them. A value that is a BF16 number is not changed by
/// rounding.
void stochastic_adamw_update(const AdamWStep& step, const RandomKey& key, BFloat16* parameter, const BFloat16* gradient,
                             float* exp_avg, float* exp_avg_sq, int64_t count);

}  // namespace snug::kernels
