#pragma once
// JSON from a file of unknown origin. Parsing nested values needs no stack, but writing a part of them again does.
// Therefore values that are nested deeper than any of snug's are left out, and are missing where they are asked for.

#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

namespace snug::detail {

/// Parses as Json::parse does.
template <class Json>
Json parse_json(std::string_view text, bool allow_exceptions = true) {
  constexpr int kDeepest = 100;
  return Json::parse(
      text, [](int depth, typename Json::parse_event_t, const Json&) { return depth < kDeepest; }, allow_exceptions);
}

/// The whole number `json`; the nearest one that T has, if it is outside. Throws Json::type_error for all else:
/// get<T>() would take a fraction too, and has no result for one that is too large.
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
