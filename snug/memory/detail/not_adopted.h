#pragma once
// A custom Function may return a saved tensor as a gradient. If nothing else holds the tensor, autograd takes it as
// .grad() without a copy, and later adds to it in place. That write would go to the model's own memory if the policy
// kept the tensor where it was, or to memory that the policy gives out again. Compiled regions write to what they have
// saved, too, if nobody else can see it. Autograd's own nodes compute what they return, so they are safe. Without hooks
// the saved tensor is held by its owner, so that autograd makes a copy.

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/csrc/autograd/function.h>

namespace snug::detail {

/// Returns `kept`, or a copy of it if a custom Function asks for it, its memory is shared, and none of these holds:
/// - `gives_away(kept)`: whoever shares it lets go of it with the Function's save, for good;
/// - `is_as_saved`, it is the tensor that was saved, and the Function is a CheckedFunction.
at::Tensor not_adopted(at::Tensor kept, bool is_as_saved, const std::function<bool(const at::Tensor&)>& gives_away);

/// While it lives, the custom Function that runs on this thread gets saved tensors as they are, and its caller passes
/// what it returns through own().
class CheckedFunction {
 public:
  CheckedFunction();
  ~CheckedFunction();
  CheckedFunction(const CheckedFunction&) = delete;
  CheckedFunction& operator=(const CheckedFunction&) = delete;

  bool has_handed_out() const { return !handed_out_.empty(); }
  /// A copy, if it is on memory that was handed out.
  at::Tensor own(const at::Tensor& returned) const;

 private:
  friend at::Tensor not_adopted(at::Tensor, bool, const std::function<bool(const at::Tensor&)>&);
  const torch::autograd::Node* node_;
  CheckedFunction* outer_;
  std::vector<const c10::StorageImpl*> handed_out_;
};

}  // namespace snug::detail
