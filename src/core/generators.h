#pragma once
// Generators of random numbers as values: the sequence that they would give next. Callers hold the locks of generators
// that others may draw from.

#include <ATen/core/Generator.h>

namespace snug::detail {

/// `to` will give the same numbers as `from`.
void copy_state(const at::Generator& from, at::Generator& to);

/// Each will give the numbers that the other was about to give.
void exchange_states(at::Generator& a, at::Generator& b);

bool have_same_state(const at::Generator& a, const at::Generator& b);

}  // namespace snug::detail
