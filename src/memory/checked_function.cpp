#include "src/memory/checked_function.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/function.h>

#include "src/memory/operator_mode.h"

namespace snug::detail {

static thread_local CheckedFunction* checked_function = nullptr;  // the innermost one

CheckedFunction::CheckedFunction()
    : node_(torch::autograd::get_current_node().get()), outer_(std::exchange(checked_function, this)) {}

CheckedFunction::~CheckedFunction() { checked_function = outer_; }

bool CheckedFunction::may_have(const void* node, const c10::StorageImpl* memory) {
  const bool is_checked = checked_function != nullptr && checked_function->node_ == node;
  if (is_checked) {
    checked_function->handed_out_.push_back(memory);
  }
  return is_checked;
}

at::Tensor CheckedFunction::own(const at::Tensor& returned) const {
  if (!returned.defined() || !returned.has_storage() ||
      std::ranges::find(handed_out_, returned.storage().unsafeGetStorageImpl()) == handed_out_.end()) {
    return returned;
  }
  const detail::UnseenOperators unseen;
  return at::clone(returned);
}

}  // namespace snug::detail
