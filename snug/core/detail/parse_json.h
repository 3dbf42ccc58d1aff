#pragma once
// JSON from a file that anybody may have written. Reading takes no stack for what is nested, but writing a part of it again does, so deeper than
// anything of ours nothing is read: what lies there is left out, and misses where it is asked for.

#include <string_view>

#include <nlohmann/json.hpp>

namespace snug::detail {

/// As Json::parse.
template <class Json>
Json parse_json(std::string_view text, bool allow_exceptions = true) {
  constexpr int kDeepest = 100;
  return Json::parse(
      text, [](int depth, typename Json::parse_event_t, const Json&) { return depth < kDeepest; }, allow_exceptions);
}

}  // namespace snug::detail
