#pragma once
// The update of many tensors by one launch of a kernel on a device. On plain memory.

#include <cstdint>

#include "src/kernels/adamw_step.h"

namespace snug::kernels {

enum class UpdateKind {
  kFloat32,          ///< FP32 parameters. The gradients are divided by the loss scale in memory, too
  kFloat16Masters,   ///< 16-bit parameters with FP32 masters
  kBFloat16Masters,  ///< the same in BF16
  kStochastic,       ///< BF16 parameters with stochastic rounding
};

/// The memory of one tensor's update. `step` is the number of the step, on the device.
struct UpdatedTensor {
  void* parameter;
  void* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  float* master;  // null without masters
  const float* step;
  int64_t count;
  uint64_t first_element;  // the number of the first element, for random numbers
};

/// Everything that a kernel gets, by value: no table is copied to the device. Bias corrections and the loss scale
/// depend on numbers on the device; `step` and `constants` have the others.
struct UpdateTable {
  static constexpr int kMostTensors = 54;
  static constexpr int64_t kChunk = 1 << 15;  ///< the elements that one block of threads updates

  UpdateTable(UpdateKind update_kind, const AdamWStep& adamw_step)
      : kind(update_kind), step(adamw_step), constants(adamw_step) {}

  uint32_t chunks() const { return size == 0 ? 0 : chunk_end[size - 1]; }
  void add(const UpdatedTensor& tensor) {
    chunk_end[size] = chunks() + static_cast<uint32_t>((tensor.count + kChunk - 1) / kChunk);
    tensors[size++] = tensor;
  }

  UpdateKind kind;
  int size = 0;
  AdamWStep step;
  AdamWConstants constants;
  const float* grad_scale = nullptr;  // null: 1
  const float* found_inf = nullptr;   // null: 0. Otherwise nothing is updated
  UpdatedTensor tensors[kMostTensors] = {};
  uint32_t chunk_end[kMostTensors] = {};  // the number of chunks of the tensors up to and with this one
};
static_assert(sizeof(UpdateTable) <= 4096, "more than the arguments of a kernel on any GPU");

namespace detail {

/// Starts the update on `stream` (a cudaStream_t) of the current CUDA device, without waiting: update_cuda.cu. Returns
/// a cudaError_t, 0 for success.
int launch_update(const UpdateTable& table, void* stream);

}  // namespace detail
}  // namespace snug::kernels
