#pragma once
// Tensors in blocks of 8- or 4-bit codes: kernels/detail/block_quantization.h on the CPU, the same with LibTorch's
// operators elsewhere.

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace snug::detail {

struct BlockCodes {
  at::Tensor codes;   // uint8
  at::Tensor ranges;  // FP32 [blocks, 2]: least value and step
  int bits;           // 8 or 4
};

/// `run`: floating, contiguous; computed with in FP32. Returns nullopt if it is not finite or its range exceeds FP32's.
/// On devices other than the CPU it waits for the device to find that out.
std::optional<BlockCodes> quantize_blocks(const at::Tensor& run, int bits, uint64_t seed);
at::Tensor dequantize_blocks(const BlockCodes& packed, int64_t count, c10::ScalarType dtype);

/// The operators behind the two functions above where there is no kernel; for any device. Their codes differ from the
/// kernel's only by the random numbers.
std::optional<BlockCodes> quantize_with_operators(const at::Tensor& run, int bits, uint64_t seed);
at::Tensor dequantize_with_operators(const BlockCodes& packed, int64_t count, c10::ScalarType dtype);

}  // namespace snug::detail
