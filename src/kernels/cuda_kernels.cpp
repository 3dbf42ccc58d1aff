#include <optional>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "snug/core.h"
#include "src/kernels/bias_gelu_cuda.h"
#include "src/kernels/device_kernels.h"

namespace snug::kernels::detail {
namespace {

KernelDtype kernel_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kHalf       ? KernelDtype::kFloat16
         : x.scalar_type() == at::kBFloat16 ? KernelDtype::kBFloat16
                                            : KernelDtype::kFloat32;
}

BiasGeluShape shape_of(const at::Tensor& x) {
  const int64_t columns = x.dim() == 0 ? 1 : x.size(-1);
  return {columns == 0 ? 0 : x.numel() / columns, columns};
}

const void* pointer(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }

void check_launch(std::string_view kernel, int error) {
  if (error != cudaSuccess) {
    throw Error(fmt::format("{}: the kernel could not be started: {}", kernel,
                            cudaGetErrorString(static_cast<cudaError_t>(error))));
  }
}

// Whether the device is one of those that the kernels are compiled for (src/CMakeLists.txt) or a newer one.
bool is_recent(c10::Device device) {
  constexpr int kFirstCompiledFor = 8;
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()) == cudaSuccess &&
         major >= kFirstCompiledFor;
}

at::Tensor gapless(const at::Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor launch_forward(const at::Tensor& x, const OptionalTensor& bias) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor in = gapless(x);
  const at::Tensor b = gapless(bias.value_or(at::Tensor()));
  at::Tensor out = at::empty_like(in);
  check_launch("bias_gelu", launch_bias_gelu(kernel_dtype(x), pointer(in), pointer(b), out.mutable_data_ptr(),
                                             shape_of(in), c10::cuda::getCurrentCUDAStream().stream()));
  return out;
}

at::Tensor launch_backward(const at::Tensor& grad, const at::Tensor& x, const OptionalTensor& bias) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dy = gapless(grad);
  const at::Tensor in = gapless(x);
  const at::Tensor b = gapless(bias.value_or(at::Tensor()));
  at::Tensor dx = at::empty_like(in);
  check_launch("bias_gelu",
               launch_bias_gelu_backward(kernel_dtype(x), pointer(dy), pointer(in), pointer(b), dx.mutable_data_ptr(),
                                         shape_of(in), c10::cuda::getCurrentCUDAStream().stream()));
  return dx;
}

// The kernels are operators to LibTorch, so that a tape sees them. It would take their results for those of empty_like.
TORCH_LIBRARY(snug, library) {
  library.def("bias_gelu(Tensor x, Tensor? bias) -> Tensor");
  library.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(snug, CUDA, library) {
  library.impl("bias_gelu", &launch_forward);
  library.impl("bias_gelu_backward", &launch_backward);
}

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

OptionalTensor if_defined(const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

}  // namespace

bool has_bias_gelu_kernel(const at::Tensor& x) {
  return x.is_cuda() && x.layout() == at::kStrided &&
         (x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat) &&
         is_recent(x.device());
}

at::Tensor device_bias_gelu(const at::Tensor& x, const at::Tensor& bias) {
  static const auto op = find_operator<decltype(launch_forward)>("snug::bias_gelu");
  return op.call(x, if_defined(bias));
}

at::Tensor device_bias_gelu_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& bias) {
  static const auto op = find_operator<decltype(launch_backward)>("snug::bias_gelu_backward");
  return op.call(grad, x, if_defined(bias));
}

UpdateLauncher cuda_update_launcher(c10::Device device) {
  if (!SNUG_CUDA_ADAMW || !device.is_cuda() || !is_recent(device)) {
    return nullptr;
  }
  return [](const UpdateTable& table, c10::Stream stream) {
    check_launch("AdamW", launch_update(table, c10::cuda::CUDAStream(stream).stream()));
  };
}

}  // namespace snug::kernels::detail
