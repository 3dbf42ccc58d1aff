#include "src/activations/tensor_hash.h"

#include <algorithm>

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "src/activations/storage_views.h"
#include "src/core/bytes_hash.h"
#include "src/core/has_bytes.h"
#include "src/memory/aside.h"

namespace snug::detail {
namespace {

constexpr int64_t kChunk = int64_t{2} << 20;  // bytes hashed at a time on a device
constexpr int64_t kFewWords = 8192;
constexpr int64_t kHashes = 1024;  // in a table

// x ^ (x >> bits), as for numbers without a sign: a bijection.
at::Tensor& fold_(at::Tensor& words, int64_t bits) {
  return words.bitwise_xor_(words.bitwise_right_shift(bits).bitwise_and_((int64_t{1} << (64 - bits)) - 1));
}

// Returns odd numbers without a pattern.
at::Tensor make_factors(int64_t count, c10::Device device) {
  constexpr auto kFactor = static_cast<int64_t>(0x9E3779B97F4A7C15U);
  at::Tensor numbers = at::arange(1, count + 1, at::dtype(at::kLong).device(device)).mul_(kFactor);
  return fold_(numbers, 29).mul_(kFactor).bitwise_or_(1);
}

// Each word goes through the last steps of MurmurHash3, which are bijections, and the sum has a factor for each
// position. So two tensors that differ in a single word have different hashes.
at::Tensor hash_of_words(const at::Tensor& words, const at::Tensor& few_factors) {
  const int64_t count = words.numel();
  const at::Tensor factors =
      count <= kFewWords ? few_factors.slice(0, 0, count) : make_factors(count, words.device());
  at::Tensor mixed = words.bitwise_xor(factors).mul_(static_cast<int64_t>(0xFF51AFD7ED558CCDU));
  fold_(mixed, 33).mul_(static_cast<int64_t>(0xC4CEB9FE1A85EC53U));
  return fold_(mixed, 33).mul_(factors).sum();
}

// The bytes of a tensor of at most kChunk bytes, as whole words. Only tensors that do not lie in aligned words are
// copied.
at::Tensor words_of(const at::Tensor& part) {
  const at::Tensor plain = part.resolve_conj().resolve_neg().contiguous();
  const auto size = static_cast<int64_t>(plain.nbytes());
  const auto offset = plain.storage_offset() * static_cast<int64_t>(plain.itemsize());
  at::Tensor bytes = storage_bytes(plain).slice(0, offset, offset + size);
  const bool is_aligned = reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) % 8 == 0;
  if (size % 8 != 0 || offset % 8 != 0 || !is_aligned) {
    bytes = at::constant_pad_nd(bytes, {0, (8 - size % 8) % 8});
  }
  return bytes.view(at::kLong);
}

// Calls f with parts of at most kChunk bytes, which make up the tensor.
template <class F>
void visit_parts(const at::Tensor& tensor, F&& f) {
  const auto size = static_cast<int64_t>(tensor.nbytes());
  if (size <= kChunk) {
    f(tensor);
    return;
  }
  const at::Tensor rows = tensor.is_contiguous() ? tensor.view({-1}) : tensor;
  const int64_t count = kChunk * rows.size(0) / size;  // rows in a part
  for (int64_t i = 0; i < rows.size(0); i += std::max<int64_t>(count, 1)) {
    if (count == 0) {
      visit_parts(rows.select(0, i), f);
    } else {
      f(rows.slice(0, i, std::min(i + count, rows.size(0))));
    }
  }
}

}  // namespace

TensorHashes::Table& TensorHashes::table_on(const c10::Stream& stream) {
  const auto has_room = [&](const Table& table) {
    return table.stream == stream && std::ssize(table.numbers) < kHashes;
  };
  const auto found = std::ranges::find_if(tables_, has_room);
  if (found != tables_.end()) {
    return *found;
  }
  return tables_.emplace_back(stream, make_factors(kFewWords, stream.device()),
                              at::empty({kHashes}, at::dtype(at::kLong).device(stream.device())));
}

size_t TensorHashes::add(const at::Tensor& tensor) {
  const Aside none_of_the_step;
  const c10::NoGradGuard no_grad;
  const size_t number = hashes_.size();
  hashes_.push_back(0);
  if (!can_be_read(tensor) || tensor.numel() == 0) {
    return number;
  }
  if (tensor.is_cpu()) {
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
    hashes_.back() = bytes_hash(plain.const_data_ptr(), plain.nbytes());
    return number;
  }
  Table& table = table_on(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
  std::vector<at::Tensor> sums;
  visit_parts(tensor.detach(),
              [&](const at::Tensor& part) { sums.push_back(hash_of_words(words_of(part), table.factors)); });
  table.values.select(0, std::ssize(table.numbers))
      .copy_(sums.size() == 1 ? sums.front() : hash_of_words(at::stack(sums), table.factors));
  table.numbers.push_back(number);
  return number;
}

const std::vector<uint64_t>& TensorHashes::read() {
  for (const Table& table : tables_) {
    const c10::StreamGuard on_stream(table.stream);
    const at::Tensor values = table.values.to(at::kCPU);
    for (size_t i = 0; i < table.numbers.size(); ++i) {
      hashes_[table.numbers[i]] = static_cast<uint64_t>(values.const_data_ptr<int64_t>()[i]);
    }
  }
  tables_.clear();
  return hashes_;
}

}  // namespace snug::detail
