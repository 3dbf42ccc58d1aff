#include "snug/activations/detail/block_codes.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "snug/kernels/detail/block_quantization.h"
#include "snug/kernels/detail/random_bits.h"

namespace snug::detail {
namespace {

using kernels::kRangeBlock;

// Elements of another type than FP32 are cast this many at a time, so that no FP32 copy of the whole exists.
constexpr int64_t kStretch = 256 * kRangeBlock;

BlockCodes empty_codes(const at::Tensor& run, int bits) {
  return {at::empty({kernels::range_code_bytes(run.numel(), bits)}, run.options().dtype(at::kByte)),
          at::empty({kernels::range_blocks(run.numel()), 2}, run.options().dtype(at::kFloat)), bits};
}

/// Calls f(begin, count) for parts of `all` elements that begin with a block.
template <class F>
void for_stretches(const at::Tensor& run, F&& f) {
  const int64_t length = run.scalar_type() == at::kFloat ? std::max<int64_t>(run.numel(), 1) : kStretch;
  for (int64_t begin = 0; begin < run.numel(); begin += length) {
    f(begin, std::min(length, run.numel() - begin));
  }
}

/// Random numbers of their own, so that dropout's are the same as without compression.
at::Generator generator_for(c10::Device device, uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(seed);
  return generator;
}

}  // namespace

std::optional<BlockCodes> quantize_blocks(const at::Tensor& run, int bits, uint64_t seed) {
  if (!run.is_cpu()) {
    return quantize_with_operators(run, bits, seed);
  }
  BlockCodes packed = empty_codes(run, bits);
  bool finite = true;
  for_stretches(run, [&](int64_t begin, int64_t count) {
    const int64_t block = begin / kRangeBlock;
    const at::Tensor values = run.narrow(0, begin, count).to(at::kFloat);
    finite = finite &&
             kernels::quantize_blocks(bits, seed, block, values.const_data_ptr<float>(), count,
                                      packed.codes.mutable_data_ptr<uint8_t>() + kernels::range_code_bytes(begin, bits),
                                      packed.ranges.mutable_data_ptr<float>() + 2 * block);
  });
  return finite ? std::optional(packed) : std::nullopt;
}

at::Tensor dequantize_blocks(const BlockCodes& packed, int64_t count, c10::ScalarType dtype) {
  if (!packed.codes.is_cpu()) {
    return dequantize_with_operators(packed, count, dtype);
  }
  at::Tensor run = at::empty({count}, packed.codes.options().dtype(dtype));
  for_stretches(run, [&](int64_t begin, int64_t length) {
    const at::Tensor part = run.narrow(0, begin, length);
    at::Tensor values = dtype == at::kFloat ? part : at::empty({length}, part.options().dtype(at::kFloat));
    kernels::dequantize_blocks(
        packed.bits, packed.codes.const_data_ptr<uint8_t>() + kernels::range_code_bytes(begin, packed.bits),
        packed.ranges.const_data_ptr<float>() + 2 * (begin / kRangeBlock), length, values.mutable_data_ptr<float>());
    if (dtype != at::kFloat) {
      part.copy_(values);
    }
  });
  return run;
}

std::optional<BlockCodes> quantize_with_operators(const at::Tensor& run, int bits, uint64_t seed) {
  const int64_t levels = (1 << bits) - 1;
  const int64_t missing = kernels::range_blocks(run.numel()) * kRangeBlock - run.numel();
  at::Tensor x = run.to(at::kFloat);
  x = at::cat({x, x.slice(0, -1).expand({missing})}).view({-1, kRangeBlock});
  const auto [least, greatest] = at::aminmax(x, 1, /*keepdim=*/true);
  const at::Tensor width = greatest - least;
  const at::Tensor flat = width < 1e-37f;
  const at::Tensor step = (width / levels).masked_fill(flat, 0);
  const at::Tensor ranges = at::cat({least, step}, 1);
  // One number for two questions: is all of it finite, and which random numbers? Other data, other numbers.
  const double sum = ranges.sum(at::kDouble).item<double>();
  if (!std::isfinite(sum)) {
    return std::nullopt;
  }
  const auto generator = generator_for(run.device(), kernels::detail::mix64(seed + std::bit_cast<uint64_t>(sum)));
  at::Tensor place = (x - least) * width.reciprocal().mul_(levels).masked_fill_(flat, 0);
  place += at::rand(place.sizes(), generator, place.options());
  at::Tensor codes = place.floor_().clamp_(0, levels).to(at::kByte);
  if (bits == 4) {
    codes = codes.narrow(1, 0, kRangeBlock / 2) + codes.narrow(1, kRangeBlock / 2, kRangeBlock / 2) * 16;
  }
  return BlockCodes{codes.reshape({-1}), ranges, bits};
}

at::Tensor dequantize_with_operators(const BlockCodes& packed, int64_t count, c10::ScalarType dtype) {
  at::Tensor codes = packed.codes.view({-1, kRangeBlock * packed.bits / 8});
  if (packed.bits == 4) {
    codes = at::cat({codes.bitwise_and(15), codes.bitwise_right_shift(4)}, 1);
  }
  const at::Tensor values =
      codes.to(at::kFloat).mul_(packed.ranges.narrow(1, 1, 1)).add_(packed.ranges.narrow(1, 0, 1));
  return values.view({-1}).narrow(0, 0, count).to(dtype);
}

}  // namespace snug::detail
