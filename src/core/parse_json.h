#pragma once
// JSON from a file of unknown origin. Parsing nested values needs no stack, but writing a part of nested values again
// needs stack. Therefore values nested deeper than any of snug's values are left out. Code that asks for a left-out
// value finds the value missing.

#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

namespace snug::detail {

/// Parses like Json::parse.
template <class Json>
Json parse_json(std::string_view text, bool allow_exceptions = true) {
  constexpr int kDeepest = 100;
  return Json::parse(
      text, [](int depth, typename Json::parse_event_t, const Json&) { return depth < kDeepest; }, allow_exceptions);
}

/// The whole number `json`, or T's nearest number if `json` is outside T's range. Throws Json::type_error for values of
/// other types. get<T>() is not used: get<T>() takes a fraction too, and has no result for a number that is too large.
template <class T, class Json>
T whole_number(const Json& json) {
  const int64_t number = json.template get_ref<const typename Json::number_integer_t&>();
  if (json.is_number_unsigned() && number < 0) {  // above 2^63
    return std::numeric_limits<T>::max();
  }
  return std::in_range<T>(number) ? static_cast<T>(number)
         : number < 0             ? std::numeric_limits<T>::min()
                                  : std::numeric_limits<T>::max();
}

}  // namespace snug::detail
