#pragma once
// Copies for custom Functions that return a saved tensor as a gradient.
//
// If nothing else refers to the returned tensor, autograd takes the tensor as .grad() without a copy, and later adds to
// the tensor in place. The in-place write goes to the wrong memory in two cases:
// - to the model's own memory, if the policy kept the tensor in place;
// - to memory that the policy gives out again.
//
// Compiled regions also write to saved tensors that nobody else can see. Autograd's own nodes compute the tensors that
// the nodes return, so autograd's own nodes are safe. Without hooks, the owner of a saved tensor refers to the tensor,
// so autograd makes a copy.

#include <functional>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Returns `kept`. Returns a copy if a custom Function asks for `kept`, the memory of `kept` is shared, and both of
/// these conditions are false:
/// - `gives_away(kept)`: whoever shares the memory lets go of the memory with the Function's save, for good;
/// - `kept` is the saved tensor itself (`is_as_saved`), and a CheckedFunction looks at the tensors that the Function
///   returns.
at::Tensor not_adopted(at::Tensor kept, bool is_as_saved, const std::function<bool(const at::Tensor&)>& gives_away);

}  // namespace snug::detail
