#pragma once
// Operators that make no values: their results are views of an argument's memory.

#include <algorithm>
#include <vector>

#include <ATen/core/function_schema.h>

namespace snug::detail {

inline bool returns_views(const c10::FunctionSchema& schema) {
  const auto writes = [](const c10::Argument& one) {
    return one.alias_info() != nullptr && one.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::ranges::none_of(schema.arguments(), writes) &&
         std::ranges::all_of(schema.returns(), [&](const c10::Argument& result) {
           return result.alias_info() != nullptr && !writes(result);
         });
}

}  // namespace snug::detail
