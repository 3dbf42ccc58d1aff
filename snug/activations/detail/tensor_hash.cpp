#include "snug/activations/detail/tensor_hash.h"

#include <array>
#include <cstring>

#include <ATen/core/Tensor.h>

namespace snug::detail {
namespace {

// Odd factor of a multiplicative hash, 2^64 divided by the golden ratio.
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15U;

uint64_t mixed(uint64_t state, uint64_t word) {
  state = (state ^ word) * kFactor;
  return state ^ (state >> 29);
}

// Four states, so that a multiplication need not wait for the one before.
uint64_t hash_bytes(const char* bytes, size_t count) {
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
  std::memcpy(words.data(), bytes + at, count - at);
  uint64_t result = count;
  for (size_t i = 0; i < 4; ++i) {
    result = mixed(result, mixed(states[i], words[i]));
  }
  return result;
}

thread_local int hashes = 0;  // under way

struct Hashing {
  Hashing() { ++hashes; }
  ~Hashing() { --hashes; }
  Hashing(const Hashing&) = delete;
  Hashing& operator=(const Hashing&) = delete;
};

}  // namespace

bool hashes_now() noexcept { return hashes > 0; }

uint64_t tensor_hash(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.device().is_meta()) {
    return 0;
  }
  const Hashing hashing;
  const at::Tensor plain = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  return hash_bytes(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
}

}  // namespace snug::detail
