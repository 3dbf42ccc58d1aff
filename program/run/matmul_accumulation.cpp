#include "program/run/matmul_accumulation.h"

#include <ATen/ATen.h>

namespace snug::detail {

MatmulAccumulation matmul_accumulation() {
  constexpr auto kAllowed = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  const at::Context& context = at::globalContext();
  return {
      .fp16_reduction = context.allowFP16ReductionCuBLAS() == kAllowed,
      .bf16_reduction = context.allowBF16ReductionCuBLAS() == kAllowed,
      .fp16_accumulation = context.allowFP16AccumulationCuBLAS(),
      .tf32 = context.allowTF32CuBLAS(),
  };
}

void accumulate_matmuls_in_fp32(bool allow_tf32) {
  at::Context& context = at::globalContext();
  context.setAllowFP16ReductionCuBLAS(false);
  context.setAllowBF16ReductionCuBLAS(false);
  context.setAllowFP16AccumulationCuBLAS(false);
  context.setAllowFP16ReductionCPU(false);
  context.setAllowTF32CuBLAS(allow_tf32);
  context.setAllowTF32CuDNN(allow_tf32);
}

}  // namespace snug::detail
