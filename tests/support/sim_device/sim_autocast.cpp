// Autocast on the simulated accelerator: LibTorch's own lists of operators.

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SNUG_SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SNUG_SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(SNUG_SIM_LOWER)
  AT_FORALL_FP32(SNUG_SIM_FP32)
#define SNUG_SIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SNUG_SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_FP32_SET_OPT_DTYPE(SNUG_SIM_FP32_DTYPE)
  AT_FORALL_PROMOTE(SNUG_SIM_PROMOTE)
#undef SNUG_SIM_FP32_DTYPE
#undef SNUG_SIM_PROMOTE
#undef SNUG_SIM_LOWER
#undef SNUG_SIM_FP32
}

}  // namespace
}  // namespace at::autocast
