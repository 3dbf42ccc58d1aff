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

#include <any>

#include <ATen/core/Tensor.h>

#include "src/memory/saved_tensor_policy.h"

namespace snug::detail {

/// Returns `kept`, which `policy` has just unpacked from `packed`. Returns a copy if a custom Function asks for `kept`,
/// the memory of `kept` is shared, and both of these conditions are false:
/// - The policy gives the memory away: whoever shares the memory lets go of the memory with the Function's save, for
///   good.
/// - The policy has kept the saved tensor itself, and a CheckedFunction looks at the tensors that the Function returns.
at::Tensor not_adopted(at::Tensor kept, SavedTensorPolicy& policy, std::any& packed);

}  // namespace snug::detail
