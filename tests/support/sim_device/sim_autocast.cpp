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
#undef SNUG_SIM_LOWER
#undef SNUG_SIM_FP32
}

}  // namespace
}  // namespace at::autocast
