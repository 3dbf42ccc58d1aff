#include <cuda_runtime.h>

#include "src/kernels/update_chunk.h"
#include "src/kernels/update_table.h"

namespace snug::kernels::detail {
namespace {

constexpr int kThreads = 512;

/// One block of threads for each chunk. The constants of a tensor's step cost many operations in FP64, so one thread
/// calculates them for its block.
template <UpdateKind kKind>
__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ UpdateTable table) {
  if (N_ONE_LANE::is_skipped(table)) {
    return;
  }
  const N_ONE_LANE::Chunk chunk = N_ONE_LANE::chunk_of(table, blockIdx.x);
  __shared__ AdamWConstants shared;
  if (threadIdx.x == 0) {
    shared = N_ONE_LANE::constants_for(table, *chunk.tensor);
  }
  __syncthreads();
  const AdamWConstants constants = shared;
  for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kThreads) {
    N_ONE_LANE::update_element<kKind>(table, *chunk.tensor, constants, i);
  }
}

}  // namespace

int launch_update(const UpdateTable& table, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  return N_ONE_LANE::with_kind(table.kind, [&](auto kind) {
    if (table.chunks() > 0) {
      update<decltype(kind)::value><<<table.chunks(), kThreads, 0, stream>>>(table);
    }
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace snug::kernels::detail
