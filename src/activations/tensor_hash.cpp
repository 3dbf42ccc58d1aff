#include "src/activations/tensor_hash.h"

#include <algorithm>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include "src/core/bytes_hash.h"
#include "src/core/has_bytes.h"
#include "src/core/read_later.h"
#include "src/memory/aside.h"

namespace snug::detail {
namespace {

// Bytes hashed at a time on a tensor's device, which takes a few copies of so many bytes.
constexpr int64_t kChunk = int64_t{2} << 20;
// Bytes that lie on the host before the host waits.
constexpr int64_t kMostToCome = int64_t{64} << 20;

// x ^ (x >> bits), as for numbers without a sign: a bijection.
at::Tensor& fold_(at::Tensor& words, int64_t bits) {
  return words.bitwise_xor_(words.bitwise_right_shift(bits).bitwise_and_((int64_t{1} << (64 - bits)) - 1));
}

// Returns odd numbers without a pattern.
at::Tensor factors(int64_t count, c10::Device device) {
  constexpr auto kFactor = static_cast<int64_t>(0x9E3779B97F4A7C15U);
  at::Tensor numbers = at::arange(1, count + 1, at::dtype(at::kLong).device(device)).mul_(kFactor);
  return fold_(numbers, 29).mul_(kFactor).bitwise_or_(1);
}

// Each word goes through the last steps of MurmurHash3, which are bijections, and the sum has a factor for each
// position. So two tensors that differ in a single word have different hashes.
at::Tensor hash_of_words(const at::Tensor& words, const at::Tensor& factors) {
  at::Tensor mixed = words.bitwise_xor(factors).mul_(static_cast<int64_t>(0xFF51AFD7ED558CCDU));
  fold_(mixed, 33).mul_(static_cast<int64_t>(0xC4CEB9FE1A85EC53U));
  return fold_(mixed, 33).mul_(factors).sum();
}

// Hashes on the tensor's device: returns a number per chunk. Only chunks without aligned words are copied first.
at::Tensor hashes_on_device(const at::Tensor& plain) {
  const at::Tensor bytes = plain.view({-1}).view(at::kByte);
  const at::Tensor all_factors = factors(kChunk / 8, plain.device());
  std::vector<at::Tensor> sums;
  for (int64_t first = 0; first < bytes.numel(); first += kChunk) {
    at::Tensor chunk = bytes.slice(0, first, std::min(first + kChunk, bytes.numel()));
    const bool is_aligned = reinterpret_cast<uintptr_t>(chunk.const_data_ptr()) % 8 == 0;
    if (chunk.numel() % 8 != 0 || chunk.storage_offset() % 8 != 0 || !is_aligned) {
      chunk = at::constant_pad_nd(chunk, {0, (8 - chunk.numel() % 8) % 8});
    }
    sums.push_back(hash_of_words(chunk.view(at::kLong), all_factors.slice(0, 0, chunk.numel() / 8)));
  }
  return at::stack(sums);
}

uint64_t hash_on_host(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.resolve_conj().resolve_neg().contiguous();
  return bytes_hash(plain.const_data_ptr(), plain.nbytes());
}

}  // namespace

size_t TensorHashes::add(const at::Tensor& tensor) {
  const Aside none_of_the_step;
  const c10::NoGradGuard no_grad;
  const size_t number = hashes_.size();
  hashes_.push_back(can_be_read(tensor) && tensor.is_cpu() ? hash_on_host(tensor.detach()) : 0);
  if (!can_be_read(tensor) || tensor.is_cpu()) {
    return number;
  }
  // Another layout takes a copy, and the device may have no memory for a copy.
  const bool has_plain_layout = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  const bool is_large = static_cast<int64_t>(tensor.nbytes()) > kChunk;
  const at::Tensor for_host = is_large && has_plain_layout ? hashes_on_device(tensor.detach()) : tensor.detach();
  to_come_.emplace_back(number, read_later(for_host));
  bytes_to_come_ += static_cast<int64_t>(for_host.nbytes());
  if (bytes_to_come_ > kMostToCome) {
    read();
  }
  return number;
}

const std::vector<uint64_t>& TensorHashes::read() {
  for (const auto& [number, values] : std::exchange(to_come_, {})) {
    hashes_[number] = hash_on_host(values());
  }
  bytes_to_come_ = 0;
  return hashes_;
}

}  // namespace snug::detail
