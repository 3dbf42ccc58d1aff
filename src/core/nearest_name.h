#pragma once
// nearest_name: the known name that a mistyped name was probably meant to be.

#include <string>
#include <string_view>
#include <vector>

namespace snug {

/// The name in `known` with the smallest edit distance (Levenshtein 1966) to `name`; the first of several. Empty if
/// `known` is empty.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

}  // namespace snug
