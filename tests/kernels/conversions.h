#pragma once
// The conversions of the kernels, one by one: numbers from and to 16 bits and 8 bits, and the random numbers of
// stochastic rounding.

#include <cstdint>

#include "src/kernels/master_adamw.h"
#include "src/kernels/random_bits.h"

namespace snug::kernels {

/// Rounds to nearest even, as master_adamw_update does.
void round_to_nearest(const float* values, Float16* rounded, int64_t count);
void round_to_nearest(const float* values, BFloat16* rounded, int64_t count);
/// Exact.
void widen(const Float16* values, float* widened, int64_t count);
void widen(const BFloat16* values, float* widened, int64_t count);

/// The random number of 32 bits of element `index`, without the offset, as stochastic_adamw_update takes it.
inline uint32_t random_bits(const RandomKey& key, uint64_t index) {
  const uint64_t place = key.offset + index;
  const detail::RandomKeys keys(key, place >> 32);
  return detail::mix32(detail::mix32(static_cast<uint32_t>(place) ^ keys.first) + keys.second);
}
/// Rounds as stochastic_adamw_update does. `bits` has one random number per element, of which the upper half is used.
void round_stochastically(const float* values, const uint32_t* bits, BFloat16* rounded, int64_t count);

/// The two dynamic maps: for the first moment, and, without negative values, for the second.
enum class DynamicCode { kSigned, kUnsigned };

/// The conversions of adamw8bit_update for a moment: quantize after the update, dequantize before it. Values for
/// kUnsigned must not be negative.
void quantize(DynamicCode code, const float* values, uint8_t* codes, float* maxima, int64_t count);
void dequantize(DynamicCode code, const uint8_t* codes, const float* maxima, float* values, int64_t count);

}  // namespace snug::kernels
