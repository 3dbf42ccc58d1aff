#pragma once
// CheckedFunction: for a language that snug is bound to, how custom Functions of its own get the tensors that they have
// saved as they are, where copies would be made else.
//
//   const snug::CheckedFunction check;                 // in the node of the graph, around the Function's backward
//   gradients = backward();
//   for (at::Tensor& gradient : gradients) {
//     gradient = check.own(gradient);
//   }

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace snug {

/// While it lives, the custom Function that runs on this thread may get the memory of others in what it asks for, and
/// its caller passes what it returns through own(): autograd would take it as a gradient, and write to it.
class [[nodiscard]] CheckedFunction final {
 public:
  CheckedFunction();
  ~CheckedFunction();
  CheckedFunction(const CheckedFunction&) = delete;
  CheckedFunction& operator=(const CheckedFunction&) = delete;

  /// Whether own() can be left out: nothing of others was handed out.
  bool is_right_as_it_is() const { return handed_out_.empty(); }
  /// A copy, if it is on memory of others.
  at::Tensor own(const at::Tensor& returned) const;

  /// Called where a saved tensor is handed out: whether `node`, a node of autograd, is the Function that runs here.
  /// Then `memory` is noted.
  static bool may_have(const void* node, const c10::StorageImpl* memory);

 private:
  const void* node_;
  CheckedFunction* outer_;
  std::vector<const c10::StorageImpl*> handed_out_;
};

}  // namespace snug
