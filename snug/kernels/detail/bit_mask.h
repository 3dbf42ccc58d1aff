#pragma once
// Masks in one bit per element instead of a byte or a float, exactly. On plain memory. Element i is bit i % 8, counted
// from the lowest, of byte i / 8. The last byte is filled up with zeros.

#include <concepts>
#include <cstdint>

namespace snug::kernels {

constexpr int64_t bit_mask_bytes(int64_t count) { return (count + 7) / 8; }

/// `mask` has one byte per element, 0 or 1.
void pack_bits(const uint8_t* mask, int64_t count, uint8_t* bits);
void unpack_bits(const uint8_t* bits, int64_t count, uint8_t* mask);

/// If all values are zero or one other value (as in dropout's factors), packs a bit for each that is not zero, sets
/// `other` and returns true. Otherwise stops soon after the first value that differs, and returns false. Words are
/// compared as bits, so any type of that size is preserved exactly. For uint16_t, uint32_t and uint64_t.
template <std::unsigned_integral Word>
bool pack_two_valued(const Word* values, int64_t count, uint8_t* bits, Word& other);
template <std::unsigned_integral Word>
void unpack_two_valued(const uint8_t* bits, int64_t count, Word other, Word* values);

}  // namespace snug::kernels
