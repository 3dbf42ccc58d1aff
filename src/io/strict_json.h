#pragma once
// JSON of a safetensors file or of an index of several: each key once in its object, no zero byte, nothing nested
// deeper than a shape is in a header.

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace snug::detail {

/// Throws CorruptFile, with the name of the file for the message.
[[noreturn]] void refuse_safetensors(const std::string& file, const std::string& what);

/// `noun` is what the text is of the file, for messages: "header". Throws CorruptFile.
nlohmann::json parse_strict_json(std::string_view text, const char* noun, const std::string& file);

/// A part of it, for messages.
std::string shown(const nlohmann::json& json);

}  // namespace snug::detail
