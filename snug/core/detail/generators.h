#pragma once
// Generators of random numbers as values: what they would give next. Callers hold the locks of those that others may draw from.

#include <ATen/core/Generator.h>

namespace snug::detail {

/// `to` will give what `from` would.
void copy_state(const at::Generator& from, at::Generator& to);

/// Each will give what the other would have.
void exchange_states(at::Generator& a, at::Generator& b);

bool have_same_state(const at::Generator& a, const at::Generator& b);

}  // namespace snug::detail
