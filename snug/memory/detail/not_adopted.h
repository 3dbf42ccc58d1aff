#pragma once
// A custom Function may return a saved tensor as a gradient. If nothing else holds the tensor, autograd takes it as
// .grad() without a copy, and later adds to it in place. That write would go to the model's own memory if the policy
// kept the tensor where it was, or to memory that the policy gives out again. Autograd's own nodes compute what they
// return, so they are safe. Without hooks the saved tensor is held by its owner, so that autograd makes a copy.

#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/function.h>

#include "snug/core/detail/computed_gradients.h"
#include "snug/core/detail/has_bytes.h"
#include "snug/memory/detail/custom_function.h"
#include "snug/memory/detail/operator_mode.h"

namespace snug::detail {

/// Whether something else uses the tensor's memory, or holds a weak pointer through which it may use it later.
inline bool is_shared(const at::Tensor& tensor) {
  constexpr uint32_t kOwnAndStrong = 2;
  return tensor.storage().use_count() > 1 || tensor.storage().getWeakStorageImpl().weak_use_count() > kOwnAndStrong;
}

/// Returns `kept`, or a copy of it if a custom Function asks for it and its memory is shared.
inline at::Tensor not_adopted(at::Tensor kept) {
  if (!can_be_read(kept) || kept.is_nested() || !is_shared(kept) ||
      !kept.is_non_overlapping_and_dense()) {  // which autograd never takes as it is
    return kept;
  }
  const auto node = torch::autograd::get_current_node();
  // CopySlices, the node of a write to a view, copies the result of the function below it.
  if (node == nullptr || !is_custom_function(*node) || node.get() == computes_its_gradients ||
      node->name() == "torch::autograd::CopySlices") {
    return kept;
  }
  const UnseenOperators unseen;
  return at::clone(kept);
}

}  // namespace snug::detail
