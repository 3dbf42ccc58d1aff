#pragma once
// The instruction sets that the kernels were compiled for, and the choice of one: for tests, which try them all.

#include <string>
#include <vector>

namespace snug::kernels::detail {

/// The instruction sets that this processor has, the best first.
std::vector<std::string> simd_targets();

/// From now on kernels in all threads use `name`; with "", the best one.
void use_simd_target(const std::string& name);

}  // namespace snug::kernels::detail
