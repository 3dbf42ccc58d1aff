#include "snug/io/snapshot.h"

// How a save survives an interruption at any point. The new snapshot is written to step-N.tmp. Every file is synced,
// then the folder, and only then it is renamed to step-N; this one operation makes the snapshot exist. An existing
// step-N is first renamed to step-N.old, which counts as snapshot N as long as there is no step-N. A folder to be
// deleted is renamed to *.removed before its content is deleted. So a folder called step-N is always whole, and *.tmp
// and *.removed are leftovers that the next save removes.

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/io/detail/checksum.h"
#include "snug/io/detail/manifest.h"
#include "snug/io/detail/safetensors_file.h"
#include "snug/io/detail/state_json.h"

namespace snug {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kStructure = "snug.state";
constexpr const char* kUnfinished = ".tmp";
constexpr const char* kReplaced = ".old";
constexpr const char* kRemoved = ".removed";

std::string folder_name(int64_t step) { return fmt::format("step-{:08}", step); }

std::string file_name(const std::string& part) { return part + ".safetensors"; }

// "step-00000120.tmp" is step 120 and ".tmp"; nullopt for other names.
struct FolderName {
  int64_t step;
  std::string suffix;
};

std::optional<FolderName> parse_folder_name(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) {
    return std::nullopt;
  }
  const std::string_view digits = name.substr(kPrefix.size());
  FolderName result{.step = 0, .suffix = ""};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), result.step);
  result.suffix = std::string(end, digits.data() + digits.size());
  const bool ours = error == std::errc() && result.step >= 0 && name == folder_name(result.step) + result.suffix;
  return ours ? std::optional(result) : std::nullopt;
}

void check_part_name(const std::string& name) {
  const bool good =
      !name.empty() && name.front() != '.' && std::all_of(name.begin(), name.end(), [](unsigned char letter) {
        return std::isalnum(letter) != 0 || letter == '_' || letter == '-' || letter == '.';
      });
  if (!good) {
    throw ConfigError(
        fmt::format("SnapshotStore.save: '{}' cannot be the name of a part; use letters, digits, '_', '-', '.'", name));
  }
}

void verify_part(const fs::path& path, const detail::Checksum& expected) {
  const detail::Checksum found = detail::checksum_of_file(path);
  if (found != expected) {
    throw CorruptFile(fmt::format("{} has {} bytes and CRC-32 {:08x}, its manifest says {} bytes and {:08x}",
                                  path.filename().string(), found.bytes, found.crc32, expected.bytes, expected.crc32));
  }
  const detail::SafetensorsReader reader(path);
  const auto structure = reader.header().metadata.find(kStructure);
  if (structure == reader.header().metadata.end()) {
    throw CorruptFile(fmt::format("{} has no '{}' in its metadata", path.string(), kStructure));
  }
  std::set<std::string> names;
  for (const detail::SafetensorsEntry& entry : reader.header().tensors) {
    names.insert(entry.name);
  }
  if (names != detail::tensor_names(structure->second, path.string())) {
    throw CorruptFile(fmt::format("{} does not hold the tensors it lists", path.string()));
  }
}

// Checks the files of the requested parts, and that there is one for each.
void verify(const FileSystem& files, const fs::path& folder, int64_t step,
            const std::map<std::string, Stateful>& parts) {
  if (!files.exists(folder / kManifest)) {
    throw CorruptFile("it has no manifest.json");
  }
  const detail::Manifest manifest = detail::parse_manifest(files.read_file(folder / kManifest));
  if (manifest.step != step) {
    throw CorruptFile(fmt::format("its manifest says step {}", manifest.step));
  }
  for (const auto& [name, part] : parts) {
    const auto sum = manifest.parts.find(name);
    if (sum == manifest.parts.end()) {
      throw ConfigError(
          fmt::format("SnapshotStore.load_latest: {} holds no '{}'; was it saved by a run with other settings?",
                      folder.string(), name));
    }
    const fs::path path = folder / file_name(name);
    if (!files.exists(path)) {
      throw CorruptFile(fmt::format("{} is missing", path.filename().string()));
    }
    verify_part(path, sum->second);
  }
}

StateDict read_part(const fs::path& path) {
  const detail::SafetensorsReader reader(path);
  return detail::unflatten(reader.header().metadata.at(kStructure), reader.tensors_in_place(), path.string());
}

}  // namespace

SnapshotStore::SnapshotStore(fs::path directory, SnapshotOptions options, FileSystem& files)
    : directory_(std::move(directory)), options_(options), files_(&files) {
  if (options_.keep < 1) {
    throw ConfigError(fmt::format("SnapshotStore: keep is {}; keep at least 1 snapshot", options_.keep));
  }
}

fs::path SnapshotStore::path_of(int64_t step) const {
  const auto all = snapshots();
  const auto found = all.find(step);
  return directory_ / (found == all.end() ? folder_name(step) : found->second);
}

std::optional<int64_t> SnapshotStore::latest() const {
  const auto all = snapshots();
  return all.empty() ? std::nullopt : std::optional(all.rbegin()->first);
}

// Step -> name of the folder, for all snapshots that can be loaded.
std::map<int64_t, std::string> SnapshotStore::snapshots() const {
  std::map<int64_t, std::string> result;
  if (!files_->exists(directory_)) {
    return result;
  }
  for (const std::string& name : files_->list(directory_)) {  // sorted: step-N before step-N.old
    const auto folder = parse_folder_name(name);
    if (folder && (folder->suffix.empty() || folder->suffix == kReplaced)) {
      result.emplace(folder->step, name);
    }
  }
  return result;
}

void SnapshotStore::save(int64_t step, const std::map<std::string, Stateful>& parts) {
  for (const auto& [name, part] : parts) {
    check_part_name(name);
  }
  const auto newest = latest();
  if (step < 0 || (newest && step < *newest)) {
    throw ConfigError(fmt::format("SnapshotStore.save: step {} is {} in {}; continue that run, or use another folder",
                                  step, step < 0 ? "negative" : fmt::format("before the newest snapshot, {},", *newest),
                                  directory_.string()));
  }
  files_->create_directories(directory_);
  clean_up();
  const fs::path folder = directory_ / (folder_name(step) + kUnfinished);
  try {
    write_parts(folder, step, parts);
    publish(folder, step);
  } catch (...) {
    try {  // So that a full disk does not stay full.
      files_->remove_all(folder);
    } catch (const Error&) {  // The first error is the one to tell.
    }
    throw;
  }
  prune();
}

// Removes the leftovers of crashed saves, and restores a *.old snapshot whose replacement was never completed.
void SnapshotStore::clean_up() {
  for (const std::string& name : files_->list(directory_)) {
    const auto folder = parse_folder_name(name);
    if (!folder || folder->suffix.empty()) {
      continue;
    }
    const fs::path proper = directory_ / folder_name(folder->step);
    if (folder->suffix == kReplaced && !files_->exists(proper)) {
      files_->rename(directory_ / name, proper);
    } else if (folder->suffix == kReplaced || folder->suffix == kUnfinished || folder->suffix == kRemoved) {
      files_->remove_all(directory_ / name);
    }
  }
}

void SnapshotStore::write_parts(const fs::path& folder, int64_t step, const std::map<std::string, Stateful>& parts) {
  detail::Manifest manifest{.step = step, .parts = {}};
  files_->create_directories(folder);
  for (const auto& [name, part] : parts) {
    const detail::FlatState flat = detail::flatten(part.state(), fmt::format("SnapshotStore.save: part '{}'", name));
    const fs::path path = folder / file_name(name);
    const detail::SafetensorsContent content(flat.tensors, {{"format", "pt"}, {kStructure, flat.structure}},
                                             path.string());
    files_->write_file(path, content.parts());
    manifest.parts[name] = detail::checksum_of(content.parts());
  }
  const std::string text = detail::format_manifest(manifest);
  files_->write_file(folder / kManifest, std::array{std::string_view(text)});
  files_->sync_directory(folder);
}

void SnapshotStore::publish(const fs::path& folder, int64_t step) {
  const fs::path proper = directory_ / folder_name(step);
  fs::path replaced = proper;
  replaced += kReplaced;
  const bool replaces = files_->exists(proper);
  if (replaces) {
    files_->rename(proper, replaced);
  }
  files_->rename(folder, proper);
  files_->sync_directory(directory_);
  if (replaces) {
    files_->remove_all(replaced);
  }
}

void SnapshotStore::prune() {
  auto all = snapshots();
  while (std::ssize(all) > options_.keep) {
    const fs::path folder = directory_ / all.begin()->second;
    fs::path removed = folder;
    removed += kRemoved;
    files_->rename(folder, removed);
    files_->remove_all(removed);
    all.erase(all.begin());
  }
}

std::optional<int64_t> SnapshotStore::load_latest(const std::map<std::string, Stateful>& parts) const {
  const auto all = snapshots();
  if (all.empty()) {
    return std::nullopt;
  }
  const auto newest = all.rbegin();
  const fs::path folder = directory_ / newest->second;
  try {
    verify(*files_, folder, newest->first, parts);
  } catch (const CorruptFile& error) {
    throw CorruptFile(fmt::format("SnapshotStore.load_latest: {} is damaged: {}; remove that folder to {}",
                                  folder.string(), error.what(),
                                  all.size() == 1 ? "start anew, as there is no other snapshot"
                                                  : fmt::format("resume from step {}", std::next(newest)->first)));
  }
  for (const auto& [name, part] : parts) {
    part.load(read_part(folder / file_name(name)));
  }
  return newest->first;
}

}  // namespace snug
