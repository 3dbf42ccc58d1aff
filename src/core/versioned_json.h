#pragma once
// Plans and profiles as JSON: an object whose first key names the kind. The value of the first key is the version of
// the format.

#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "src/core/parse_json.h"

namespace snug::detail {

using OrderedJson = nlohmann::ordered_json;

struct JsonKind {
  const char* key;   ///< such as "snug_step_plan"
  const char* type;  ///< the C++ type, for messages
  const char* noun;  ///< "plan"
  const char* cure;  ///< "plan again"
  int version = 1;
};

/// Returns an object of this kind with `fields`. More fields may be added.
inline OrderedJson versioned_json(const JsonKind& kind, OrderedJson fields) {
  OrderedJson json{{kind.key, kind.version}};
  json.update(fields);
  return json;
}

/// Returns read(json) after a check of the version. Throws ConfigError if `text` is not JSON, is of another kind or
/// version, or lacks a value that `read` asks for.
template <class Read>
auto read_versioned_json(const JsonKind& kind, std::string_view text, Read&& read) {
  try {
    const auto json = parse_json<OrderedJson>(text);
    if (const int version = whole_number<int>(json.at(kind.key)); version != kind.version) {
      throw ConfigError(fmt::format("{}: format version is {}, this program reads {}; {}", kind.type, version,
                                    kind.version, kind.cure));
    }
    return std::forward<Read>(read)(json);
  } catch (const OrderedJson::exception& error) {
    throw ConfigError(fmt::format("{}: not a {} in JSON: {}; {}", kind.type, kind.noun, error.what(), kind.cure));
  }
}

}  // namespace snug::detail
