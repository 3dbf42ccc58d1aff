#pragma once
// The dynamic (tree) data type of 8-bit optimizers (Dettmers 2016, arXiv:1511.04561; Dettmers et al. 2022, arXiv:2110.02861), as
// arithmetic instead of a table of 256 values.
//
// Decade i of 7 covers 10^(i-7) to 10^(i-6), cut into 2^i cells of equal width (2^(i+1) where there is no sign); the values are the
// middles of the cells. With them go 0 and 1. The byte is the value's place in ascending order, as in bitsandbytes.
//
// Count the cells so that decade i begins at the power of two that is its number of cells. Then the exponent of a cell's number q tells its
// decade, inside of which the value is a straight line in q. Backwards, the number of the cell that holds x is a curve of seven straight
// pieces, each less steep than the one before, hence the least of the seven lines.

#include <array>
#include <cstddef>

namespace snug::kernels::detail {

constexpr size_t kDecades = 7;

/// With a sign cells count from 0, which is zero's; without, from 1.
struct DynamicMap {
  // The middle of cell q is q * step + start. By decade + 1, and once more, for vectors of 16.
  alignas(64) std::array<float, 16> step{};
  alignas(64) std::array<float, 16> start{};
  // The position of x among the cells: the least of x * slope + offset.
  std::array<float, kDecades + 1> slope{};
  std::array<float, kDecades + 1> offset{};
  // The same by pairs of binary exponents, the last of which ends at 2: the lines that are least at its left and right end.
  alignas(64) std::array<float, 16> left_slope{};
  alignas(64) std::array<float, 16> left_offset{};
  alignas(64) std::array<float, 16> right_slope{};
  alignas(64) std::array<float, 16> right_offset{};
  // What passes it where 1 is nearer than the last value below.
  float last_slope = 0;
  float last_offset = 0;
};

constexpr int kFirstBucket = 48;  ///< a float's highest byte from 2^-31 on

constexpr void set_buckets(DynamicMap& map) {
  const auto least = [&map](double x) {
    size_t line = 0;
    for (size_t i = 1; i < map.slope.size(); ++i) {
      line = x * map.slope[i] + map.offset[i] < x * map.slope[line] + map.offset[line] ? i : line;
    }
    return line;
  };
  double end = 2;
  for (size_t bucket = 16; bucket-- > 0; end /= 4) {
    const size_t left = least(bucket == 0 ? 0 : end / 4);
    const size_t right = least(end);
    map.left_slope[bucket] = map.slope[left];
    map.left_offset[bucket] = map.offset[left];
    map.right_slope[bucket] = map.slope[right];
    map.right_offset[bucket] = map.offset[right];
  }
}

constexpr DynamicMap dynamic_map(bool is_signed) {
  DynamicMap map;
  double end = 1e-6;  // of the decade
  double cells = is_signed ? 1 : 2;
  for (size_t i = 0; i < kDecades; ++i, end *= 10, cells *= 2) {
    const double width = 0.9 * end / cells;
    for (const size_t place : {i + 1, i + 9}) {
      map.step[place] = static_cast<float>(width);
      map.start[place] = static_cast<float>(0.5 * width - 0.8 * end);
    }
    map.slope[i] = static_cast<float>(1 / width);
    map.offset[i] = static_cast<float>(cells * 8 / 9);
  }
  // Zero and one have places 0 and 8, which are the same in vectors of 8: a line through both.
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
    // The first value takes over from zero at its half, 2.75e-7, which is to lie one fifth into its cell.
    map.slope[0] = static_cast<float>(0.8 / 0.725e-6);
    map.offset[0] = static_cast<float>(2 - 0.8 / 0.725);
    map.slope[kDecades] = map.slope[0];
    map.offset[kDecades] = map.offset[0];
  } else {
    // All above zero, and not only from its half on, is at least a fifth into the first cell.
    map.slope[0] = static_cast<float>(0.75 / 0.55e-6);
    map.offset[0] = 2.25f;
    map.slope[kDecades] = 3e38f;
    map.offset[kDecades] = 1.75f;
  }
  set_buckets(map);
  return map;
}

template <bool kSigned>
inline constexpr DynamicMap kDynamicMap = dynamic_map(kSigned);

}  // namespace snug::kernels::detail
