#include "src/memory/not_adopted.h"

#include <typeinfo>

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/function.h>

#include "src/core/computed_gradients.h"
#include "src/core/has_bytes.h"
#include "src/memory/checked_function.h"
#include "src/memory/custom_function.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

// Whether something else uses the tensor's memory, or has a weak pointer and may use the memory later.
bool is_shared(const at::Tensor& tensor) {
  constexpr uint32_t kOwnAndStrong = 2;
  return tensor.storage().use_count() > 1 || tensor.storage().getWeakStorageImpl().weak_use_count() > kOwnAndStrong;
}

}  // namespace

at::Tensor not_adopted(at::Tensor kept, SavedTensorPolicy& policy, std::any& packed) {
  if (!can_be_read(kept) || kept.is_nested() || !is_shared(kept)) {
    return kept;
  }
  const auto node = torch::autograd::get_current_node();
  // CopySlices, the node of a write to a view, copies the result of the function below CopySlices.
  if (node == nullptr || !is_custom_function(*node) || node.get() == computes_its_gradients ||
      node->name() == "torch::autograd::CopySlices" || policy.gives_away(packed, kept)) {
    return kept;
  }
  if (packed.type() == typeid(at::Tensor) &&
      CheckedFunction::may_have(node.get(), kept.storage().unsafeGetStorageImpl())) {
    return kept;
  }
  if (!kept.is_non_overlapping_and_dense()) {  // autograd never takes a tensor with this layout without a copy
    return kept;
  }
  const UnseenOperators unseen;
  return at::clone(kept);
}

}  // namespace snug::detail
