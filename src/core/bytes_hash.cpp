#include "src/core/bytes_hash.h"

#include <array>
#include <cstring>

namespace snug::detail {
namespace {

// Odd factor of a multiplicative hash, 2^64 divided by the golden ratio.
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15U;

// A bijection of the state for a given word, and of the word for a given state.
uint64_t mixed(uint64_t state, uint64_t word) {
  state = (state ^ word) * kFactor;
  return state ^ (state >> 29);
}

}  // namespace

// Keeps four states, so a multiplication does not wait for the previous multiplication.
uint64_t bytes_hash(const void* data, size_t count) {
  const auto* bytes = static_cast<const char*>(data);
  std::array<uint64_t, 4> states{1, 2, 3, 4};
  std::array<uint64_t, 4> words{};
  size_t at = 0;
  for (; at + sizeof(words) <= count; at += sizeof(words)) {
    std::memcpy(words.data(), bytes + at, sizeof(words));
    for (size_t i = 0; i < 4; ++i) {
      states[i] = mixed(states[i], words[i]);
    }
  }
  words = {};
  if (at < count) {
    std::memcpy(words.data(), bytes + at, count - at);
  }
  uint64_t result = count;
  for (size_t i = 0; i < 4; ++i) {
    result = mixed(result, mixed(states[i], words[i]));
  }
  return result;
}

}  // namespace snug::detail
