#include "src/io/snapshot_folder.h"

#include <charconv>
#include <set>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/io/checksum.h"
#include "src/io/safetensors_file.h"
#include "src/io/state_json.h"

namespace snug::detail {

namespace fs = std::filesystem;

std::string snapshot_folder_name(int64_t step) { return fmt::format("step-{:08}", step); }

std::string snapshot_part_file(const std::string& part) { return part + ".safetensors"; }

std::optional<SnapshotFolderName> parse_snapshot_folder_name(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) {
    return std::nullopt;
  }
  const std::string_view digits = name.substr(kPrefix.size());
  SnapshotFolderName result{.step = 0, .suffix = ""};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), result.step);
  result.suffix = std::string(end, digits.data() + digits.size());
  const bool ours =
      error == std::errc() && result.step >= 0 && name == snapshot_folder_name(result.step) + result.suffix;
  return ours ? std::optional(result) : std::nullopt;
}

Manifest read_snapshot_manifest(const FileSystem& files, const fs::path& folder, int64_t step) {
  if (!files.exists(folder / kManifestFile)) {
    throw CorruptFile("it has no manifest.json");
  }
  Manifest manifest = parse_manifest(files.read_file(folder / kManifestFile), folder.string());
  if (manifest.step != step) {
    throw CorruptFile(fmt::format("its manifest says step {}", manifest.step));
  }
  return manifest;
}

void verify_snapshot_part(const FileSystem& files, const fs::path& folder, const std::string& part,
                          const Checksum& expected) {
  const fs::path path = folder / snapshot_part_file(part);
  if (!files.exists(path)) {
    throw CorruptFile(fmt::format("{} is missing", path.filename().string()));
  }
  const Checksum found = checksum_of_file(path);
  if (found != expected) {
    throw CorruptFile(fmt::format("{} has {} bytes and CRC-32 {:08x}, its manifest says {} bytes and {:08x}",
                                  path.filename().string(), found.bytes, found.crc32, expected.bytes, expected.crc32));
  }
  const SafetensorsReader reader(path);
  const auto structure = reader.header().metadata.find(kSnapshotStructure);
  if (structure == reader.header().metadata.end()) {
    throw CorruptFile(fmt::format("{} has no '{}' in its metadata", path.string(), kSnapshotStructure));
  }
  std::set<std::string> names;
  for (const SafetensorsEntry& entry : reader.header().tensors) {
    names.insert(entry.name);
  }
  if (names != tensor_names(structure->second, path.string())) {
    throw CorruptFile(fmt::format("{} does not hold the tensors it lists", path.string()));
  }
}

StateDict read_snapshot_part(const fs::path& folder, const std::string& part) {
  const fs::path path = folder / snapshot_part_file(part);
  const SafetensorsReader reader(path);
  return unflatten(reader.header().metadata.at(kSnapshotStructure), reader.tensors_in_place(), path.string());
}

}  // namespace snug::detail
