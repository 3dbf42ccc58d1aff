#pragma once
// in_parts: runs an element-by-element operator over the elements of many CPU tensors at once. LibTorch's fused
// operators go from tensor to tensor on the CPU; for each tensor the operators wake all threads and wait for all
// threads. With the 75 tensors of a small GPT the waking and waiting took half of a step. in_parts gives each thread a
// part of all elements, and each thread calls the operator for the thread's part. The result has the same bits.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "src/core/parallel.h"

namespace snug::detail {

/// A multiple of the sizes of vectors and cache lines, and enough work for a call of an operator.
inline constexpr int64_t kPartGrain = 1 << 15;

/// Elements begin to end - 1 of a tensor, and of the tensors that have the same layout in memory. A scalar (a count of
/// steps) belongs to every part.
struct Part {
  int64_t begin, end;

  at::Tensor of(const at::Tensor& tensor) const {
    if (tensor.dim() == 0 || (begin == 0 && end == tensor.numel())) {
      return tensor;
    }
    return tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
  }
};

/// Whether the tensors lie on the CPU and without gaps in memory, so that their elements may be visited in any parts.
inline bool can_go_in_parts(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_non_overlapping_and_dense(); });
}

/// Calls `update(i, part)` on LibTorch's threads, without gradient mode. The parts together are all elements of all
/// `tensors`. Parts begin at multiples of kPartGrain elements.
template <class Update>
void in_parts(const std::vector<at::Tensor>& tensors, const Update& update) {
  std::vector<int64_t> counts;
  counts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    counts.push_back(tensor.numel());
  }
  parallel_for(counts, kPartGrain, [&](size_t i, int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    update(i, Part{begin, end});
  });
}

/// Calls `fused(tensors, lists...)`, an operator of LibTorch that goes through lists of tensors element by element. If
/// `tensors` can go in parts, `fused` is called for each part, otherwise once for all tensors. Each list of `lists` is
/// empty, or as long as `tensors`. The tensors of a list are scalars, or have the memory layout of `tensors`.
template <class Fused, class... Lists>
void call_in_parts(const Fused& fused, const std::vector<at::Tensor>& tensors, const Lists&... lists) {
  if (!can_go_in_parts(tensors)) {
    fused(tensors, lists...);
    return;
  }
  in_parts(tensors, [&](size_t i, const Part& part) {
    const auto of = [&](const std::vector<at::Tensor>& list) {
      return list.empty() ? std::vector<at::Tensor>() : std::vector{part.of(list[i])};
    };
    fused(of(tensors), of(lists)...);
  });
}

}  // namespace snug::detail
