#pragma once
// Generators of random numbers as values: a generator's value is the sequence of numbers that will come next. If other
// code may draw from a generator, the caller holds the generator's lock.

#include <ATen/core/Generator.h>

namespace snug::detail {

/// After the call, `to` will give the same numbers as `from`.
void copy_state(const at::Generator& from, at::Generator& to);

/// After the call, each generator will give the numbers that the other generator was about to give.
void exchange_states(at::Generator& a, at::Generator& b);

bool have_same_state(const at::Generator& a, const at::Generator& b);

}  // namespace snug::detail
