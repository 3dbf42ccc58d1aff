#include "snug/kernels/detail/bit_mask.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace snug::kernels {
namespace {

static_assert(std::endian::native == std::endian::little, "eight bytes are read as one word");

// Eight bytes of 0 or 1 become the top byte of the product: byte i is moved from bit 8 i to bit 56 + i, and no two
// parts overlap.
uint8_t pack_eight(const uint8_t* mask) {
  uint64_t word;
  std::memcpy(&word, mask, 8);
  return static_cast<uint8_t>((word * 0x0102040810204080) >> 56);
}

// Byte i of the word keeps bit i alone; adding 0x7F carries it, wherever it is, to the byte's top.
void unpack_eight(uint8_t bits, uint8_t* mask) {
  uint64_t word = (bits * uint64_t{0x0101010101010101}) & 0x8040201008040201;
  word = ((word + 0x7F7F7F7F7F7F7F7F) >> 7) & 0x0101010101010101;
  std::memcpy(mask, &word, 8);
}

}  // namespace

void pack_bits(const uint8_t* mask, int64_t count, uint8_t* bits) {
  const int64_t whole = count / 8;
  for (int64_t i = 0; i < whole; ++i) {
    bits[i] = pack_eight(mask + 8 * i);
  }
  if (count > 8 * whole) {
    uint8_t rest[8] = {};
    std::copy_n(mask + 8 * whole, count - 8 * whole, rest);
    bits[whole] = pack_eight(rest);
  }
}

void unpack_bits(const uint8_t* bits, int64_t count, uint8_t* mask) {
  const int64_t whole = count / 8;
  for (int64_t i = 0; i < whole; ++i) {
    unpack_eight(bits[i], mask + 8 * i);
  }
  if (count > 8 * whole) {
    uint8_t rest[8];
    unpack_eight(bits[whole], rest);
    std::copy_n(rest, count - 8 * whole, mask + 8 * whole);
  }
}

template <std::unsigned_integral Word>
bool pack_two_valued(const Word* values, int64_t count, uint8_t* bits, Word& other) {
  constexpr int64_t kStretch = 256;  // between two looks at whether to go on
  const Word* const found = std::find_if(values, values + count, [](Word value) { return value != 0; });
  other = found == values + count ? Word{0} : *found;
  uint8_t mask[kStretch];
  for (int64_t begin = 0; begin < count; begin += kStretch) {
    const int64_t n = std::min(count - begin, kStretch);
    bool differs = false;
    for (int64_t i = 0; i < n; ++i) {
      const Word value = values[begin + i];
      mask[i] = static_cast<uint8_t>(value != 0);
      differs |= (value != 0) & (value != other);
    }
    if (differs) {
      return false;
    }
    pack_bits(mask, n, bits + begin / 8);
  }
  return true;
}

template <std::unsigned_integral Word>
void unpack_two_valued(const uint8_t* bits, int64_t count, Word other, Word* values) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = (bits[i / 8] >> (i % 8)) & 1 ? other : Word{0};
  }
}

template bool pack_two_valued(const uint16_t*, int64_t, uint8_t*, uint16_t&);
template bool pack_two_valued(const uint32_t*, int64_t, uint8_t*, uint32_t&);
template bool pack_two_valued(const uint64_t*, int64_t, uint8_t*, uint64_t&);
template void unpack_two_valued(const uint8_t*, int64_t, uint16_t, uint16_t*);
template void unpack_two_valued(const uint8_t*, int64_t, uint32_t, uint32_t*);
template void unpack_two_valued(const uint8_t*, int64_t, uint64_t, uint64_t*);

}  // namespace snug::kernels
