#pragma once
// A StepKind as JSON: three fields of an object. The object may have other fields.

#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

#include "src/core/parse_json.h"
#include "src/step/step_to_plan.h"

namespace snug::detail {

inline nlohmann::json json_of(const StepKind& kind) {
  nlohmann::json tensors = nlohmann::json::array();
  for (const auto& [type, sizes] : kind.shape.tensors) {
    tensors.push_back({static_cast<int>(type), sizes});
  }
  return {{"modes", kind.modes}, {"trained", kind.trained}, {"tensors", tensors}};
}

/// Throws nlohmann's exceptions if a field is missing or of another type.
template <class Json>
StepKind kind_from(const Json& json) {
  StepKind kind{.modes = whole_number<uint32_t>(json.at("modes")),
                .trained = whole_number<uint32_t>(json.at("trained"))};
  for (const Json& tensor : json.at("tensors")) {
    kind.shape.tensors.emplace_back(static_cast<at::ScalarType>(whole_number<int>(tensor.at(0))),
                                    tensor.at(1).template get<std::vector<int64_t>>());
  }
  return kind;
}

}  // namespace snug::detail
