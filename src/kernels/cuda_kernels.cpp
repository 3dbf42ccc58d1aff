#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/kernels/device_kernels.h"

namespace snug::kernels::detail {
namespace {

// Whether the device is one of those that the kernels are compiled for (src/CMakeLists.txt) or a newer one.
bool is_recent(c10::Device device) {
  constexpr int kFirstCompiledFor = 8;
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()) == cudaSuccess &&
         major >= kFirstCompiledFor;
}

}  // namespace

UpdateLauncher cuda_update_launcher(c10::Device device) {
  if (!device.is_cuda() || !is_recent(device)) {
    return nullptr;
  }
  return [](const UpdateTable& table, c10::Stream stream) {
    const int error = launch_update(table, c10::cuda::CUDAStream(stream).stream());
    if (error != cudaSuccess) {
      throw Error(fmt::format("AdamW: the kernel could not be started: {}",
                              cudaGetErrorString(static_cast<cudaError_t>(error))));
    }
  };
}

}  // namespace snug::kernels::detail
