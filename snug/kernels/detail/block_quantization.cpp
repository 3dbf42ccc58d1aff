#include "snug/kernels/detail/block_quantization.h"

#include <algorithm>

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "snug/kernels/detail/block_quantization.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "snug/kernels/detail/random_bits.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<D>;
using DI = hn::RebindToSigned<D>;
using D8 = hn::Rebind<uint8_t, D>;
using Float = hn::Vec<D>;
using Int = hn::Vec<DI>;

constexpr uint32_t kInfinity = 0x7F800000;
constexpr float kLeastRange = 1e-37f;  // its inverse, times 255, is still finite

struct Summary {
  float least;
  float greatest;
  bool finite;
  uint32_t sum_of_bits;
};

Summary summarize(const float* values) {
  const D d;
  const DU du;
  Float least = hn::Load(d, values);
  Float greatest = least;
  auto magnitude = hn::Zero(du);
  auto sum = hn::Zero(du);
  for (int64_t i = 0; i < kRangeBlock; i += static_cast<int64_t>(hn::Lanes(d))) {
    const Float x = hn::Load(d, values + i);
    const auto bits = hn::BitCast(du, x);
    least = hn::Min(least, x);
    greatest = hn::Max(greatest, x);
    magnitude = hn::Max(magnitude, hn::And(bits, hn::Set(du, 0x7FFFFFFF)));
    sum = hn::Add(sum, bits);
  }
  // Lane by lane: the compiler's own sum of lanes is of signed numbers, whose overflow is undefined.
  uint32_t lanes[HWY_MAX_BYTES / sizeof(uint32_t)];
  hn::StoreU(sum, du, lanes);
  uint32_t total = 0;
  for (size_t i = 0; i < hn::Lanes(du); ++i) {
    total += lanes[i];
  }
  return {hn::GetLane(hn::MinOfLanes(d, least)), hn::GetLane(hn::MaxOfLanes(d, greatest)),
          hn::GetLane(hn::MaxOfLanes(du, magnitude)) < kInfinity, total};
}

/// As detail::mix32.
HWY_INLINE hn::Vec<DU> mix(hn::Vec<DU> x) {
  const DU du;
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(du, detail::kMultiplier1));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(du, detail::kMultiplier2));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

struct Grid {
  Float least;
  Float inverse;
  Int levels;
  hn::Vec<DU> key;

  /// The codes of the elements from `begin` on: down, or up with the probability of the fraction.
  HWY_INLINE Int encode(const float* values, int64_t begin) const {
    const D d;
    const DU du;
    const DI di;
    const Float place = hn::Mul(hn::Sub(hn::Load(d, values + begin), least), inverse);
    const Int below = hn::ConvertTo(di, place);
    const Float fraction = hn::Sub(place, hn::ConvertTo(d, below));
    const auto random = mix(hn::Xor(hn::Iota(du, static_cast<uint32_t>(begin)), key));
    const Float uniform = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, hn::ShiftRight<8>(random))), hn::Set(d, 0x1p-24f));
    // A true mask is -1.
    const Int up = hn::BitCast(di, hn::VecFromMask(d, hn::Lt(uniform, fraction)));
    return hn::Min(hn::Sub(below, up), levels);
  }
};

template <int kBits>
bool quantize_block(uint64_t key, const float* values, uint8_t* codes, float* range) {
  constexpr int kLevels = (1 << kBits) - 1;
  const Summary block = summarize(values);
  const float width = block.greatest - block.least;
  if (!block.finite || !(width <= 3.4e38f)) {
    return false;
  }
  const bool flat = width < kLeastRange;
  range[0] = block.least;
  range[1] = flat ? 0.0f : width / kLevels;
  const D d;
  const DI di;
  const D8 d8;
  const auto mixed = static_cast<uint32_t>(detail::mix64(key + block.sum_of_bits));
  const Grid grid{hn::Set(d, block.least), hn::Set(d, flat ? 0.0f : kLevels / width), hn::Set(di, kLevels),
                  hn::Set(DU(), mixed)};
  constexpr int64_t kBytes = kRangeBlock * kBits / 8;
  for (int64_t i = 0; i < kBytes; i += static_cast<int64_t>(hn::Lanes(d))) {
    Int code = grid.encode(values, i);
    if constexpr (kBits == 4) {
      code = hn::Or(code, hn::ShiftLeft<4>(grid.encode(values, i + kBytes)));
    }
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
  }
  return true;
}

template <int kBits>
bool quantize_all(uint64_t seed, int64_t first_block, const float* values, int64_t count, uint8_t* codes,
                  float* ranges) {
  HWY_ALIGN float block[kRangeBlock];
  for (auto number = static_cast<uint64_t>(first_block); count > 0; count -= kRangeBlock, ++number) {
    const int64_t n = std::min(count, kRangeBlock);
    std::copy_n(values, n, block);
    std::fill(block + n, block + kRangeBlock, values[n - 1]);
    const uint64_t key = detail::mix64(seed + 0x9E3779B97F4A7C15) + (number << 32);
    if (!quantize_block<kBits>(key, block, codes, ranges)) {
      return false;
    }
    values += n;
    codes += kRangeBlock * kBits / 8;
    ranges += 2;
  }
  return true;
}

template <int kBits>
void dequantize_all(const uint8_t* codes, const float* ranges, int64_t count, float* values) {
  constexpr int64_t kBytes = kRangeBlock * kBits / 8;
  const D d;
  const DI di;
  const D8 d8;
  HWY_ALIGN float block[kRangeBlock];
  for (; count > 0; count -= kRangeBlock) {
    const Float least = hn::Set(d, ranges[0]);
    const Float step = hn::Set(d, ranges[1]);
    const auto value_of = [&](Int code) HWY_ATTR { return hn::Add(hn::Mul(hn::ConvertTo(d, code), step), least); };
    for (int64_t i = 0; i < kBytes; i += static_cast<int64_t>(hn::Lanes(d))) {
      const Int code = hn::PromoteTo(di, hn::LoadU(d8, codes + i));
      if constexpr (kBits == 4) {
        hn::Store(value_of(hn::And(code, hn::Set(di, 15))), d, block + i);
        hn::Store(value_of(hn::ShiftRight<4>(code)), d, block + i + kBytes);
      } else {
        hn::Store(value_of(code), d, block + i);
      }
    }
    const int64_t n = std::min(count, kRangeBlock);
    std::copy_n(block, n, values);
    values += n;
    codes += kBytes;
    ranges += 2;
  }
}

bool quantize(int bits, uint64_t seed, int64_t first_block, const float* values, int64_t count, uint8_t* codes,
              float* ranges) {
  return bits == 8 ? quantize_all<8>(seed, first_block, values, count, codes, ranges)
                   : quantize_all<4>(seed, first_block, values, count, codes, ranges);
}

void dequantize(int bits, const uint8_t* codes, const float* ranges, int64_t count, float* values) {
  bits == 8 ? dequantize_all<8>(codes, ranges, count, values) : dequantize_all<4>(codes, ranges, count, values);
}

}  // namespace
}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::kernels {

HWY_EXPORT(quantize);
HWY_EXPORT(dequantize);

bool quantize_blocks(int bits, uint64_t seed, int64_t first_block, const float* values, int64_t count, uint8_t* codes,
                     float* ranges) {
  return HWY_DYNAMIC_DISPATCH(quantize)(bits, seed, first_block, values, count, codes, ranges);
}

void dequantize_blocks(int bits, const uint8_t* codes, const float* ranges, int64_t count, float* values) {
  HWY_DYNAMIC_DISPATCH(dequantize)(bits, codes, ranges, count, values);
}

}  // namespace snug::kernels
#endif
