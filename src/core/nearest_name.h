#pragma once
// nearest_name: the valid name that was probably meant by a mistyped name.

#include <string>
#include <string_view>
#include <vector>

namespace snug {

/// The name in `known` with the smallest edit distance (Levenshtein 1966) to `name`; the first name, if several names
/// have the smallest distance. Empty if `known` is empty.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

}  // namespace snug
