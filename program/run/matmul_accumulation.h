#pragma once
// How LibTorch sums matrix products on CUDA.

namespace snug::detail {

/// The accuracy that LibTorch lets CUDA's matrix products give up for speed. The settings belong to the process.
struct MatmulAccumulation {
  bool fp16_reduction = true;      ///< partial sums of FP16 products may be added in FP16; LibTorch's default
  bool bf16_reduction = true;      ///< the same for BF16
  bool fp16_accumulation = false;  ///< FP16 products may sum in FP16 throughout
  bool tf32 = false;               ///< FP32 products may round their inputs to TF32, which has a mantissa of 10 bits
};
/// The settings of this process now.
MatmulAccumulation matmul_accumulation();

/// From now on, in the whole process, 16-bit matrix products sum in FP32. FP32 products, products of convolutions
/// included, use TF32 only if allowed. Changes nothing on most CPUs, whose 16-bit products sum in FP32 already.
void accumulate_matmuls_in_fp32(bool allow_tf32 = false);

}  // namespace snug::detail
