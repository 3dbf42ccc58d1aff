#pragma once
// A custom Function may return a saved tensor as a gradient. If nothing else holds the tensor, autograd takes it as
// .grad() without a copy, and later adds to it in place. That write would go to the model's own memory if the policy
// kept the tensor where it was, or to memory that the policy gives out again. Compiled regions write to what they have
// saved, too, if nobody else can see it. Autograd's own nodes compute what they return, so they are safe. Without hooks
// the saved tensor is held by its owner, so that autograd makes a copy.

#include <functional>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Returns `kept`, or a copy of it if a custom Function asks for it, its memory is shared, and none of these holds:
/// - `gives_away(kept)`: whoever shares it lets go of it with the Function's save, for good;
/// - `is_as_saved`, it is the tensor that was saved, and a CheckedFunction looks at what the Function returns.
at::Tensor not_adopted(at::Tensor kept, bool is_as_saved, const std::function<bool(const at::Tensor&)>& gives_away);

}  // namespace snug::detail
