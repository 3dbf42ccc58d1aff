#pragma once
// CheckedFunction: for languages that snug is bound to. With a CheckedFunction, a custom Function of the language gets
// the Function's saved tensors as they are, in cases that need copies otherwise.
//
//   const CheckedFunction check;                 // in the node of the graph, around the Function's backward
//   gradients = backward();
//   for (at::Tensor& gradient : gradients) {
//     gradient = check.own(gradient);
//   }

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace snug::detail {

/// While a CheckedFunction lives, the custom Function that runs on this thread may get memory of other owners as saved
/// tensors. The caller passes the Function's results through own(), because autograd takes a result as a gradient, and
/// writes to the gradient.
class [[nodiscard]] CheckedFunction final {
 public:
  CheckedFunction();
  ~CheckedFunction();
  CheckedFunction(const CheckedFunction&) = delete;
  CheckedFunction& operator=(const CheckedFunction&) = delete;

  /// Whether own() can be left out, because no memory of other owners was handed out.
  bool is_right_as_it_is() const { return handed_out_.empty(); }
  /// A copy of `returned`, if `returned` is on memory of other owners.
  at::Tensor own(const at::Tensor& returned) const;

  /// Called when a saved tensor is handed out. Returns whether `node`, a node of autograd, is the Function that runs on
  /// this thread. If so, `memory` is noted.
  static bool may_have(const void* node, const c10::StorageImpl* memory);

 private:
  const void* node_;
  CheckedFunction* outer_;
  std::vector<const c10::StorageImpl*> handed_out_;
};

}  // namespace snug::detail
