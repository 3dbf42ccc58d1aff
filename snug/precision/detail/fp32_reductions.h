#pragma once
// AutocastOptions::fp32_reductions: under CPU autocast, the operators that CUDA's autocast runs in FP32 run in FP32 too.

namespace snug::detail {

/// This thread's switch. It matters only where CPU autocast is on.
bool fp32_reductions();
/// The first `true` of the process registers the kernels, so that a program that never asks for them has LibTorch's autocast as it is.
void set_fp32_reductions(bool on);

}  // namespace snug::detail
