#include "src/io/manifest.h"

#include <charconv>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "src/core/parse_json.h"

namespace snug::detail {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "snug snapshot";
constexpr int64_t kVersion = 1;

uint32_t parse_crc(const std::string& text) {
  uint32_t crc = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), crc, 16);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw CorruptFile(fmt::format("its manifest has '{}' as a checksum", text));
  }
  return crc;
}

// A later version's snapshot is not damaged: a run must not pass over it.
void refuse_later_version(const Json& json, const std::string& folder) {
  const Json& version = json.at("version");
  if (json.at("format") == kFormat && version.is_number_integer() && version > kVersion) {
    throw ConfigError(
        fmt::format("snapshot {}: a later version of snug saved it (its format is {}, this one reads {}); "
                    "go on with that version",
                    folder, version.dump(), kVersion));
  }
}

Manifest parse(const Json& json, const std::string& folder) {
  refuse_later_version(json, folder);
  if (json.at("format") != kFormat || json.at("version") != kVersion) {
    throw CorruptFile(fmt::format("its manifest says format {}, version {}, but this program reads '{}', version {}",
                                  json.at("format").dump(), json.at("version").dump(), kFormat, kVersion));
  }
  Manifest manifest{.step = whole_number<int64_t>(json.at("step")), .parts = {}};
  for (const auto& [name, entry] : json.at("files").items()) {
    manifest.parts[name] = {.bytes = whole_number<int64_t>(entry.at("bytes")),
                            .crc32 = parse_crc(entry.at("crc32").get<std::string>())};
  }
  return manifest;
}

}  // namespace

std::string format_manifest(const Manifest& manifest) {
  Json files = Json::object();
  for (const auto& [name, sum] : manifest.parts) {
    files[name] = {{"bytes", sum.bytes}, {"crc32", fmt::format("{:08x}", sum.crc32)}};
  }
  const Json json{{"format", kFormat}, {"version", kVersion}, {"step", manifest.step}, {"files", files}};
  return json.dump(2) + "\n";
}

Manifest parse_manifest(const std::string& text, const std::string& folder) {
  try {
    return parse(parse_json<Json>(text), folder);
  } catch (const Json::exception& error) {
    throw CorruptFile(fmt::format("its manifest cannot be read ({})", error.what()));
  }
}

}  // namespace snug::detail
