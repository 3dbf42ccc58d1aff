#include "src/io/strict_json.h"

#include <set>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {

void refuse_safetensors(const std::string& file, const std::string& what) {
  throw CorruptFile(
      fmt::format("load_safetensors: {}: {}; is the file incomplete, damaged or of another format?", file, what));
}

// nlohmann silently keeps one of two equal keys, which the format forbids, and takes a zero byte for the end.
nlohmann::json parse_strict_json(std::string_view text, const char* noun, const std::string& file) {
  if (text.find('\0') != std::string_view::npos) {
    refuse_safetensors(file, fmt::format("the {} is not JSON (it has a zero byte)", noun));
  }
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (depth > 3) {
      refuse_safetensors(file, fmt::format("the {} is nested deeper than the format allows", noun));
    }
    if (event == nlohmann::json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == nlohmann::json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == nlohmann::json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      refuse_safetensors(file, fmt::format("the key '{}' is in the {} twice", value.get<std::string>(), noun));
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, check);
  } catch (const nlohmann::json::exception& error) {
    refuse_safetensors(file, fmt::format("the {} is not JSON ({})", noun, error.what()));
  }
}

std::string shown(const nlohmann::json& json) {
  return json.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

}  // namespace snug::detail
