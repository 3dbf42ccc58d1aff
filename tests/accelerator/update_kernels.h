#pragma once
// Kernels of updates for the simulated accelerator: the functions of CUDA's kernels, by the CPU.

namespace snug::testing {

/// While it lives, the simulated accelerator has the kernels. CUDA has its own.
class [[nodiscard]] WithUpdateKernels {
 public:
  WithUpdateKernels();
  ~WithUpdateKernels();
  WithUpdateKernels(const WithUpdateKernels&) = delete;
  WithUpdateKernels& operator=(const WithUpdateKernels&) = delete;

  /// The number of kernels started since then, on the simulated accelerator.
  int launches() const;
};

}  // namespace snug::testing
