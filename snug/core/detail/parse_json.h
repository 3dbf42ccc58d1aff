#pragma once
// JSON from a file of unknown origin. Parsing nested values needs no stack, but writing a part of them again does.
// Therefore values that are nested deeper than any of snug's are left out, and are missing where they are asked for.

#include <string_view>

#include <nlohmann/json.hpp>

namespace snug::detail {

/// Parses as Json::parse does.
template <class Json>
Json parse_json(std::string_view text, bool allow_exceptions = true) {
  constexpr int kDeepest = 100;
  return Json::parse(
      text, [](int depth, typename Json::parse_event_t, const Json&) { return depth < kDeepest; }, allow_exceptions);
}

}  // namespace snug::detail
