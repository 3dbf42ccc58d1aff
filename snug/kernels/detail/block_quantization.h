#pragma once
// Block-wise quantization of activations to 8 or 4 bits with stochastic rounding: the scheme of ActNN (Chen et al.
// 2021, arXiv:2104.14129), on plain memory.
//
// Each block of 256 elements is represented on a grid of 255 or 15 equal steps from its least to its greatest value. An
// element becomes one of its two neighbours on that grid, the nearer one more often, so that its expectation is the
// element itself.

#include <cstdint>

namespace snug::kernels {

constexpr int64_t kRangeBlock = 256;
/// The number of blocks for `count` elements. Each block takes 2 floats and 256 or 128 bytes of codes.
constexpr int64_t range_blocks(int64_t count) { return (count + kRangeBlock - 1) / kRangeBlock; }
constexpr int64_t range_code_bytes(int64_t count, int bits) { return range_blocks(count) * kRangeBlock * bits / 8; }

/// Writes the codes (`bits` is 8 or 4) and, per block, its least value and its step. Value i of a block is least + step
/// * code i. In 4 bits, element i < 128 is the low half of byte i, and element i + 128 its high half. Returns false,
/// and leaves the output undefined, if a value is not finite or a block's range is too large for a float. A range below
/// 1e-37 becomes one value.
///
/// The random numbers depend only on the seed, the number of the block (from `first_block` on) and the values in it:
/// the same call gives the same codes, and other values get other random numbers.
bool quantize_blocks(int bits, uint64_t seed, int64_t first_block, const float* values, int64_t count, uint8_t* codes,
                     float* ranges);

void dequantize_blocks(int bits, const uint8_t* codes, const float* ranges, int64_t count, float* values);

}  // namespace snug::kernels
