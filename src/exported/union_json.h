#pragma once
// Values of one of several kinds, which torch.export writes as objects of one field: {"as_int": 3}.

#include <string>

#include <nlohmann/json.hpp>

#include "snug/core.h"

namespace snug::detail {

using ExportJson = nlohmann::json;

struct UnionJson {
  const std::string& kind;
  const ExportJson& value;
};

/// The result refers to `json`. Throws CorruptFile if `json` is not an object of one field.
inline UnionJson union_of(const ExportJson& json) {
  if (!json.is_object() || json.size() != 1) {
    throw CorruptFile("a value is no object of one field, which would name its kind");
  }
  return {json.begin().key(), json.begin().value()};
}

}  // namespace snug::detail
