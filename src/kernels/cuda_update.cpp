#include <string_view>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/kernels/bias_gelu_cuda.h"
#include "src/kernels/cuda_checks.h"
#include "src/kernels/device_update.h"
#include "src/kernels/update_cuda.h"

namespace snug::kernels::detail {

bool has_cuda_kernels(c10::Device device) {
  constexpr int kFirstCompiledFor = 8;
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()) == cudaSuccess &&
         major >= kFirstCompiledFor;
}

void check_launch(std::string_view kernel, int error) {
  if (error != 0) {
    throw Error(fmt::format("{}: the kernel could not be started: {}", kernel, cuda_error_text(error)));
  }
}

UpdateLauncher cuda_update_launcher(c10::Device device) {
  if (!has_cuda_kernels(device)) {
    return nullptr;
  }
  return [](const UpdateTable& table, c10::Stream stream) {
    check_launch("AdamW", launch_update(table, stream.native_handle()));
  };
}

}  // namespace snug::kernels::detail
