#include "snug/core.h"
#include "src/kernels/device_kernels.h"

namespace snug::kernels::detail {

bool has_bias_gelu_kernel(const at::Tensor&) { return false; }

at::Tensor device_bias_gelu(const at::Tensor&, const at::Tensor&) {
  throw Error("bias_gelu: snug was built without CUDA");
}

at::Tensor device_bias_gelu_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  throw Error("bias_gelu: snug was built without CUDA");
}

UpdateLauncher cuda_update_launcher(c10::Device) { return nullptr; }

}  // namespace snug::kernels::detail
