// The order of an epoch is a swap-or-not shuffle (Hoang, Morris & Rogaway 2012, "An Enciphering Scheme Based on a Card
// Shuffle", arXiv:1208.1176). In each round a random pivot pairs every index with the index's mirror image, (pivot -
// index) modulo the size, and a random bit per pair says whether the two indices are swapped. A round is the round's
// own inverse, so any number of rounds is a permutation of exactly [0, size). The new position of one index is computed
// without the other indices. The distance from a uniform shuffle falls geometrically with the rounds; the tests compare
// 128 rounds with uniformity.
//
// The random numbers are splitmix64 (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators", with
// the constants of Vigna, https://prng.di.unimi.it/splitmix64.c): integer arithmetic only, so every platform and every
// standard library agrees.

#include "snug/sampler.h"

#include <algorithm>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/data/shares.h"

namespace snug {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

// The output function of splitmix64: every bit of the result depends on every bit of x.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t splitmix64(uint64_t& state) {
  state += kGolden;
  return mix(state);
}

}  // namespace

Sampler::Sampler(int64_t size, uint64_t seed) : size_(size), seed_(seed) {
  if (size < 1) {
    throw ConfigError(fmt::format("Sampler: size is {}; the data set needs at least one item", size));
  }
  start_epoch(0);
}

void Sampler::start_epoch(int64_t epoch) {
  epoch_ = epoch;
  position_ = 0;
  // Seed and epoch both go through the mixer, so that (seed, epoch + 1) and (seed + 1, epoch) have nothing in common.
  uint64_t state = mix(mix(seed_ + kGolden) + static_cast<uint64_t>(epoch));
  for (Round& round : rounds_) {
    round.pivot = splitmix64(state) % static_cast<uint64_t>(size_);
    round.key = splitmix64(state);
  }
}

int64_t Sampler::permuted(int64_t index) const {
  const auto size = static_cast<uint64_t>(size_);
  auto x = static_cast<uint64_t>(index);
  for (const Round& round : rounds_) {
    const uint64_t partner = round.pivot >= x ? round.pivot - x : round.pivot + (size - x);
    const uint64_t pair = std::max(x, partner);
    if ((mix(pair + round.key) & 1) != 0) {
      x = partner;
    }
  }
  return static_cast<int64_t>(x);
}

std::vector<int64_t> Sampler::next(int64_t count) { return next(count, 0, 1); }

std::vector<int64_t> Sampler::next(int64_t count, int64_t rank, int64_t ranks) {
  if (count < 0) {
    throw ConfigError(fmt::format("Sampler.next: count is {}; give 0 or more", count));
  }
  if (rank < 0 || rank >= ranks) {
    throw ConfigError(fmt::format("Sampler.next: rank is {} of {}; ranks are counted from 0", rank, ranks));
  }
  const int64_t begin = detail::share_begin(count, rank, ranks);
  const int64_t end = detail::share_begin(count, rank + 1, ranks);
  std::vector<int64_t> indices;
  indices.reserve(static_cast<size_t>(end - begin));
  for (int64_t drawn = 0; drawn < count; ++drawn) {
    if (drawn >= begin && drawn < end) {
      indices.push_back(permuted(position_));
    }
    ++position_;
    if (position_ == size_) {
      start_epoch(epoch_ + 1);
    }
  }
  return indices;
}

void Sampler::seek(int64_t epoch, int64_t position) {
  if (epoch < 0 || position < 0 || position >= size_) {
    throw ConfigError(
        fmt::format("Sampler.seek: epoch {}, position {} is not within a data set of {} items; was the snapshot made "
                    "with other data?",
                    epoch, position, size_));
  }
  start_epoch(epoch);
  position_ = position;
}

}  // namespace snug
