#include "snug/activations/detail/tensor_hash.h"

#include <algorithm>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include "snug/core/detail/bytes_hash.h"

namespace snug::detail {
namespace {

thread_local int hashes = 0;  // under way

struct Hashing {
  Hashing() { ++hashes; }
  ~Hashing() { --hashes; }
  Hashing(const Hashing&) = delete;
  Hashing& operator=(const Hashing&) = delete;
};

// A few of these are made while a tensor is hashed on its device.
constexpr int64_t kChunk = int64_t{2} << 20;

// Different odd numbers, without a pattern.
at::Tensor factors(int64_t count, c10::Device device) {
  constexpr auto kFactor = static_cast<int64_t>(0x9E3779B97F4A7C15U);
  at::Tensor numbers = at::arange(1, count + 1, at::dtype(at::kLong).device(device)).mul_(kFactor);
  numbers.bitwise_xor_(numbers.bitwise_right_shift(29)).mul_(kFactor);
  return numbers.bitwise_or_(1);
}

// Each word is mixed by bijections (those of MurmurHash3's last steps), and the sum has a factor for each place.
at::Tensor hash_of_words(const at::Tensor& words, const at::Tensor& factors) {
  at::Tensor mixed = words.bitwise_xor(factors).mul_(static_cast<int64_t>(0xFF51AFD7ED558CCDU));
  mixed.bitwise_xor_(mixed.bitwise_right_shift(33)).mul_(static_cast<int64_t>(0xC4CEB9FE1A85EC53U));
  mixed.bitwise_xor_(mixed.bitwise_right_shift(33)).mul_(factors);
  return mixed.sum();
}

// Where the tensor is: it takes a hundredth of the time that a copy to the host does.
uint64_t hash_on_device(const at::Tensor& plain) {
  const at::Tensor bytes = plain.view({-1}).view(at::kByte);
  const at::Tensor all_factors = factors(kChunk / 8, plain.device());
  std::vector<at::Tensor> sums;
  for (int64_t first = 0; first < bytes.numel(); first += kChunk) {
    at::Tensor chunk = bytes.slice(0, first, std::min(first + kChunk, bytes.numel()));
    if (chunk.numel() % 8 != 0 || chunk.storage_offset() % 8 != 0) {
      chunk = at::constant_pad_nd(chunk, {0, (8 - chunk.numel() % 8) % 8});
    }
    sums.push_back(hash_of_words(chunk.view(at::kLong), all_factors.slice(0, 0, chunk.numel() / 8)));
  }
  const at::Tensor found = at::stack(sums).to(at::kCPU);
  return bytes_hash(found.const_data_ptr(), found.nbytes());
}

}  // namespace

bool hashes_now() noexcept { return hashes > 0; }

uint64_t tensor_hash(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.device().is_meta()) {
    return 0;
  }
  const Hashing hashing;
  at::Tensor plain = tensor.detach();
  const bool is_large = static_cast<int64_t>(plain.nbytes()) > kChunk;
  if (!is_large) {
    plain = plain.to(at::kCPU);
  }
  plain = plain.resolve_conj().resolve_neg().contiguous();
  if (!plain.is_cpu()) {
    const c10::NoGradGuard no_grad;
    return hash_on_device(plain);
  }
  return bytes_hash(plain.const_data_ptr(), plain.nbytes());
}

}  // namespace snug::detail
