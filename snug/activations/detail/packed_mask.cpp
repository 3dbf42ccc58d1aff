#include "snug/activations/detail/packed_mask.h"

#include <ATen/ATen.h>

#include "snug/kernels/detail/bit_mask.h"

namespace snug::detail {
namespace {

at::Tensor places(const at::Tensor& like) {
  return at::bitwise_left_shift(at::ones({8}, like.options().dtype(at::kByte)),
                                at::arange(8, like.options().dtype(at::kByte)));
}

template <class Word>
std::optional<TwoValued> pack_words(const at::Tensor& run) {
  TwoValued packed{at::empty({kernels::bit_mask_bytes(run.numel())}, run.options().dtype(at::kByte)), 0};
  Word other = 0;
  const auto* words = static_cast<const Word*>(run.const_data_ptr());
  if (!kernels::pack_two_valued(words, run.numel(), packed.bits.mutable_data_ptr<uint8_t>(), other)) {
    return std::nullopt;
  }
  packed.other = other;
  return packed;
}

template <class Word>
void unpack_words(const TwoValued& packed, const at::Tensor& run) {
  kernels::unpack_two_valued(packed.bits.const_data_ptr<uint8_t>(), run.numel(), static_cast<Word>(packed.other),
                             static_cast<Word*>(run.mutable_data_ptr()));
}

}  // namespace

at::Tensor pack_mask(const at::Tensor& mask) {
  const int64_t count = mask.numel();
  if (mask.is_cpu()) {
    at::Tensor bits = at::empty({kernels::bit_mask_bytes(count)}, mask.options().dtype(at::kByte));
    kernels::pack_bits(static_cast<const uint8_t*>(mask.const_data_ptr()), count, bits.mutable_data_ptr<uint8_t>());
    return bits;
  }
  const at::Tensor bytes = at::constant_pad_nd(mask.reshape({-1}).to(at::kByte), {0, -count & 7}).view({-1, 8});
  return (bytes * places(mask)).sum(1, /*keepdim=*/false, at::kByte);
}

at::Tensor unpack_mask(const at::Tensor& bits, int64_t count) {
  if (bits.is_cpu()) {
    at::Tensor mask = at::empty({count}, bits.options().dtype(at::kBool));
    kernels::unpack_bits(bits.const_data_ptr<uint8_t>(), count, static_cast<uint8_t*>(mask.mutable_data_ptr()));
    return mask;
  }
  return bits.unsqueeze(1).bitwise_and(places(bits)).ne(0).view({-1}).narrow(0, 0, count);
}

at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset()); }

std::optional<TwoValued> pack_two_valued(const at::Tensor& run) {
  switch (run.element_size()) {
    case 2:
      return pack_words<uint16_t>(run);
    case 4:
      return pack_words<uint32_t>(run);
    case 8:
      return pack_words<uint64_t>(run);
    default:
      return std::nullopt;
  }
}

at::Tensor unpack_two_valued(const TwoValued& packed, int64_t count, c10::ScalarType dtype) {
  at::Tensor run = at::empty({count}, packed.bits.options().dtype(dtype));
  switch (run.element_size()) {
    case 2:
      unpack_words<uint16_t>(packed, run);
      break;
    case 4:
      unpack_words<uint32_t>(packed, run);
      break;
    default:
      unpack_words<uint64_t>(packed, run);
  }
  return run;
}

}  // namespace snug::detail
