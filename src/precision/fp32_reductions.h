#pragma once
// AutocastOptions::fp32_reductions: under CPU autocast, the operators that CUDA's autocast runs in FP32 run in FP32
// too.

namespace snug::detail {

/// This thread's switch. The switch matters only while CPU autocast is on.
bool fp32_reductions();
/// The first call with `true` in the process registers the kernels. A program without such a call has LibTorch's own
/// autocast.
void set_fp32_reductions(bool on);

}  // namespace snug::detail
