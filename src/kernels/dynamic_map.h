#pragma once
// The dynamic (tree) data type of 8-bit optimizers (Dettmers 2016, arXiv:1511.04561; Dettmers et al. 2022,
// arXiv:2110.02861), as arithmetic instead of a table of 256 values.
//
// Decade i of 7 covers 10^(i-7) to 10^(i-6). The decade is cut into 2^i cells of equal width (2^(i+1) without a
// sign), and the decade's values are the middles of the cells. The values 0 and 1 are added. The byte is the value's
// rank in ascending order, as in bitsandbytes.
//
// The cells are numbered so that decade i begins at the number of cells of decade i, a power of two. The exponent of a
// cell's number q then gives the decade, and inside the decade the value is linear in q. In the other direction, the
// number of the cell of x is a curve of seven straight pieces, each less steep than the piece before: the least of the
// seven lines.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace snug::kernels::detail {

constexpr size_t kDecades = 7;

/// With a sign cells count from 0, which is zero's; without, from 1.
struct DynamicMap {
  // The middle of cell q is q * step + start. By decade + 1.
  alignas(32) std::array<float, 9> step{};
  alignas(32) std::array<float, 9> start{};
  // The position of x among the cells: the least of x * slope + offset.
  std::array<float, kDecades + 1> slope{};
  std::array<float, kDecades + 1> offset{};
  // The line that exceeds the position where 1 is nearer than the last value below.
  float last_slope = 0;
  float last_offset = 0;
};

constexpr DynamicMap dynamic_map(bool is_signed) {
  DynamicMap map;
  double end = 1e-6;  // of the decade
  double cells = is_signed ? 1 : 2;
  for (size_t i = 0; i < kDecades; ++i, end *= 10, cells *= 2) {
    const double width = 0.9 * end / cells;
    map.step[i + 1] = static_cast<float>(width);
    map.start[i + 1] = static_cast<float>(0.5 * width - 0.8 * end);
    map.slope[i] = static_cast<float>(1 / width);
    map.offset[i] = static_cast<float>(cells * 8 / 9);
  }
  // Zero and one have the places 0 and 8, which coincide in vectors of 8: one line goes through both.
  const float zero = is_signed ? 0.5f : 1.0f;
  for (const size_t place : {0, 8}) {
    map.step[place] = 1 / (is_signed ? 127.5f : 255.0f);
    map.start[place] = -zero * map.step[place];
  }
  // 1 is nearer from a quarter of a cell before it.
  const double last_width = 0.9 / (cells / 2);
  map.last_slope = static_cast<float>(2.8 / last_width);
  map.last_offset = static_cast<float>(cells - 2.8 / last_width + 0.7);
  if (is_signed) {
    // The first value takes over from zero at half of it, 2.75e-7. This point must be one fifth into the first value's
    // cell.
    map.slope[0] = static_cast<float>(0.8 / 0.725e-6);
    map.offset[0] = static_cast<float>(2 - 0.8 / 0.725);
    map.slope[kDecades] = map.slope[0];
    map.offset[kDecades] = map.offset[0];
  } else {
    // Without a sign, every value above zero, not only those from the half on, must be at least a fifth into the first
    // cell.
    map.slope[0] = static_cast<float>(0.75 / 0.55e-6);
    map.offset[0] = 2.25f;
    map.slope[kDecades] = 3e38f;
    map.offset[kDecades] = 1.75f;
  }
  return map;
}

template <bool kSigned>
inline constexpr DynamicMap kDynamicMap = dynamic_map(kSigned);

/// The map for vectors of 16, which hold a whole table: by segment, which is 0 for zero, i + 1 for decade i, 8 for one.
struct DynamicSegments {
  // The middle of cell q is q * step + start, by the last four bits of the exponent of q, or with a sign of 4 q, where
  // zero is none.
  alignas(64) std::array<float, 16> step{};
  alignas(64) std::array<float, 16> start{};
  // The code's distance from zero's is x * slope + offset, rounded, but no more than the last one.
  alignas(64) std::array<float, 16> slope{};
  alignas(64) std::array<float, 16> offset{};
  alignas(64) std::array<float, 16> last{};
  // The upper bound of the values below the next segment that begins at or above 2^(2 bucket - 31), with the number of
  // the segment before in the last four bits.
  alignas(64) std::array<float, 16> below_next{};
};

constexpr int kFirstBucket = 48;  ///< a float's highest byte from 2^-31 on

constexpr DynamicSegments dynamic_segments(bool is_signed) {
  DynamicSegments map;
  std::array<double, kDecades + 3> begins{};  // and where the last one ends
  double end = 1e-6;                          // of the decade
  double cells = is_signed ? 1 : 2;
  const double first_cell = is_signed ? 0 : 1;
  for (size_t i = 0; i < kDecades; ++i, end *= 10, cells *= 2) {
    const double width = 0.9 * end / cells;
    const double first = 0.1 * end + 0.5 * width;
    const size_t place = is_signed ? i + 1 : i;
    map.step[place] = static_cast<float>(width / (is_signed ? 4 : 1));
    map.start[place] = static_cast<float>(first - cells * width);
    map.slope[i + 1] = static_cast<float>(1 / width);
    map.offset[i + 1] = static_cast<float>(cells - first_cell - first / width);
    map.last[i + 1] = static_cast<float>(2 * cells - first_cell - 1);
    // Halfway from the last value below, whose cell is five times narrower; and for the last decade, halfway to 1.
    begins[i + 1] = 0.1 * end + 0.2 * width;
    begins[i + 2] = end - 0.25 * width;
  }
  map.start[is_signed ? 8 : 7] = 1;
  map.offset[8] = map.last[8] = static_cast<float>(cells - first_cell);
  begins[9] = 4;
  if (is_signed) {
    begins[1] = 0.5 * 5.5e-7;
  } else {
    // Every value above zero has a code above zero: the line to the first change, at 5.5e-7, begins at 0.75.
    begins[1] = 0;
    map.slope[1] = static_cast<float>(0.75 / 5.5e-7);
    map.offset[1] = 0.75f;
  }
  size_t next = 1;
  double bucket_begin = 0;
  for (size_t bucket = 0; bucket < 16; ++bucket) {
    while (begins[next] < bucket_begin) {
      ++next;
    }
    const auto segment = static_cast<uint32_t>(next - 1);
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(begins[next]));
    map.below_next[bucket] = std::bit_cast<float>(((bits - segment + 8) & ~15u) + segment);
    bucket_begin = bucket == 0 ? 0x1p-29 : 4 * bucket_begin;
  }
  return map;
}

template <bool kSigned>
inline constexpr DynamicSegments kDynamicSegments = dynamic_segments(kSigned);

}  // namespace snug::kernels::detail
