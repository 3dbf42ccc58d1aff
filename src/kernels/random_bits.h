#pragma once
// Random numbers as a function of a place, so that any thread can calculate any of them.

#include <cstdint>

#include "src/kernels/host_device.h"
#include "src/kernels/master_adamw.h"

namespace snug::kernels::detail {

// Of SplitMix64: its multipliers, and the step of its counter.
constexpr uint64_t kMultiplier64A = 0xBF58476D1CE4E5B9;
constexpr uint64_t kMultiplier64B = 0x94D049BB133111EB;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

/// Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators": SplitMix64's output function.
SNUG_HOST_DEVICE constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * kMultiplier64A;
  x = (x ^ (x >> 27)) * kMultiplier64B;
  return x ^ (x >> 31);
}

// Multipliers and shifts of Wellons' hash lowbias32 (2018), a bijection of 32 bits in which each bit of the input
// changes each bit of the output with a probability very near to 1/2.
constexpr uint32_t kMultiplier1 = 0x7FEB352D;
constexpr uint32_t kMultiplier2 = 0x846CA68B;

SNUG_HOST_DEVICE constexpr uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * kMultiplier1;
  x = (x ^ (x >> 15)) * kMultiplier2;
  return x ^ (x >> 16);
}

/// The keys that 2^32 consecutive elements share: random(index) = mix32(mix32(index ^ first) + second), with the low
/// half of the index.
struct RandomKeys {
  SNUG_HOST_DEVICE constexpr RandomKeys(const RandomKey& key, uint64_t index_high) {
    const uint64_t mixed = mix64(mix64(mix64(key.seed + kGolden) + key.step + kGolden) + index_high + kGolden);
    first = static_cast<uint32_t>(mixed);
    second = static_cast<uint32_t>(mixed >> 32);
  }
  uint32_t first;
  uint32_t second;
};

}  // namespace snug::kernels::detail
