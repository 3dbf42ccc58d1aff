#pragma once
// Which instruction sets the kernels were compiled for, and choosing one: for tests, which try them all.

#include <string>
#include <vector>

namespace snug::kernels::detail {

/// Those that this processor has, the best first.
std::vector<std::string> simd_targets();

/// From now on, in all threads, kernels use that one; with "", the best one.
void use_simd_target(const std::string& name);

}  // namespace snug::kernels::detail
