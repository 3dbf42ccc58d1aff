#pragma once
// A snapshot's folder: its name, its files, and whether they are whole.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "snug/state.h"
#include "src/core/file_system.h"
#include "src/io/manifest.h"

namespace snug::detail {

constexpr const char* kManifestFile = "manifest.json";
constexpr const char* kSnapshotStructure = "snug.state";  // in the metadata of a part's file

std::string snapshot_folder_name(int64_t step);

/// "step-00000120.tmp" is step 120 and ".tmp".
struct SnapshotFolderName {
  int64_t step;
  std::string suffix;
};

/// nullopt for names that are no snapshot's.
std::optional<SnapshotFolderName> parse_snapshot_folder_name(std::string_view name);

std::string snapshot_part_file(const std::string& part);

/// The manifest of the snapshot of `step` in `folder`. Throws CorruptFile if it is not there, damaged, or of another
/// step.
Manifest read_snapshot_manifest(const FileSystem& files, const std::filesystem::path& folder, int64_t step);

/// Throws CorruptFile, which names the file, unless a part's file has the size and the checksum that the manifest says,
/// and the tensors that it lists.
void verify_snapshot_part(const FileSystem& files, const std::filesystem::path& folder, const std::string& part,
                          const Checksum& expected);

StateDict read_snapshot_part(const std::filesystem::path& folder, const std::string& part);

}  // namespace snug::detail
