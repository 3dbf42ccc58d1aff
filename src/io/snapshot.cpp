#include "snug/snapshot.h"

// How a save survives an interruption at any point. The new snapshot is written to step-N.tmp. Every file is synced,
// then the folder, and only then it is renamed to step-N; this one operation makes the snapshot exist. An existing
// step-N is first renamed to step-N.old, which counts as snapshot N as long as there is no step-N. A folder to be
// deleted is renamed to *.removed before its content is deleted. So a folder called step-N is always whole, and *.tmp
// and *.removed are leftovers that the next save removes.

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "src/core/writers.h"
#include "src/io/checksum.h"
#include "src/io/manifest.h"
#include "src/io/safetensors_file.h"
#include "src/io/snapshot_folder.h"
#include "src/io/state_json.h"

namespace snug {
namespace {

namespace fs = std::filesystem;

constexpr const char* kUnfinished = ".tmp";
constexpr const char* kReplaced = ".old";
constexpr const char* kRemoved = ".removed";
constexpr const char* kDamaged = ".damaged";

// Checks the files of the requested parts, and that there is one for each.
void verify(const detail::FileSystem& files, const fs::path& folder, int64_t step,
            const std::map<std::string, Stateful>& parts) {
  const detail::Manifest manifest = detail::read_snapshot_manifest(files, folder, step);
  for (const auto& [name, part] : parts) {
    const auto sum = manifest.parts.find(name);
    if (sum == manifest.parts.end()) {
      throw ConfigError(
          fmt::format("SnapshotStore.load_latest: {} holds no '{}'; it was saved by a run with other settings, or by "
                      "another version of snug: resume with those",
                      folder.string(), name));
    }
    detail::verify_snapshot_part(files, folder, name, sum->second);
  }
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

}  // namespace

SnapshotStore::SnapshotStore(fs::path directory, SnapshotOptions options)
    : SnapshotStore(std::move(directory), std::move(options), detail::FileSystem::real()) {}

SnapshotStore::SnapshotStore(fs::path directory, SnapshotOptions options, detail::FileSystem& files)
    : directory_(std::move(directory)), options_(options), files_(&files) {
  if (options_.keep < 1) {
    throw ConfigError(fmt::format("SnapshotStore: keep is {}; keep at least 1 snapshot", options_.keep));
  }
}

fs::path SnapshotStore::path_of(int64_t step) const {
  const auto all = snapshots();
  const auto found = all.find(step);
  return directory_ / (found == all.end() ? detail::snapshot_folder_name(step) : found->second);
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
    const auto folder = detail::parse_snapshot_folder_name(name);
    if (folder && (folder->suffix.empty() || folder->suffix == kReplaced)) {
      result.emplace(folder->step, name);
    }
  }
  return result;
}

void SnapshotStore::save(int64_t step, const std::map<std::string, Stateful>& parts) {
  detail::Writers& writers = detail::Writers::now();
  const fs::path folder = directory_ / (detail::snapshot_folder_name(step) + kUnfinished);
  writers.first([&] { prepare(step, parts); });
  try {
    writers.first([&] { files_->create_directories(folder); });
    const detail::Manifest manifest = write_parts(folder, step, parts);
    writers.first([&] {
      write_manifest(folder, manifest);
      publish(folder, step);
    });
  } catch (...) {
    try {  // So that a full disk does not stay full.
      if (writers.is_first()) {
        files_->remove_all(folder);
      }
    } catch (const Error&) {  // The first error is the one to tell.
    }
    throw;
  }
  writers.first([&] { prune(); });
}

// Before the first change, and the changes that come before the snapshot itself.
void SnapshotStore::prepare(int64_t step, const std::map<std::string, Stateful>& parts) {
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
}

// Removes the leftovers of crashed saves, and restores a *.old snapshot whose replacement was never completed.
void SnapshotStore::clean_up() {
  for (const std::string& name : files_->list(directory_)) {
    const auto folder = detail::parse_snapshot_folder_name(name);
    if (!folder || folder->suffix.empty()) {
      continue;
    }
    const fs::path proper = directory_ / detail::snapshot_folder_name(folder->step);
    if (folder->suffix == kReplaced && !files_->exists(proper)) {
      files_->rename(directory_ / name, proper);
    } else if (folder->suffix == kReplaced || folder->suffix == kUnfinished || folder->suffix == kRemoved) {
      files_->remove_all(directory_ / name);
    }
  }
}

detail::Manifest SnapshotStore::write_parts(const fs::path& folder, int64_t step,
                                            const std::map<std::string, Stateful>& parts) {
  detail::Manifest manifest{.step = step, .parts = {}};
  for (const auto& [name, part] : parts) {
    detail::FlatState flat;
    detail::Writers::now().together(
        [&] { flat = detail::flatten(part.state(), fmt::format("SnapshotStore.save: part '{}'", name)); });
    const fs::path path = folder / detail::snapshot_part_file(name);
    manifest.parts[name] = detail::write_safetensors(
        *files_, path, flat.tensors, {{"format", "pt"}, {detail::kSnapshotStructure, flat.structure}}, path.string());
  }
  return manifest;
}

void SnapshotStore::write_manifest(const fs::path& folder, const detail::Manifest& manifest) {
  const std::string text = detail::format_manifest(manifest);
  files_->write_file(folder / detail::kManifestFile, std::array{std::string_view(text)});
  files_->sync_directory(folder);
}

void SnapshotStore::publish(const fs::path& folder, int64_t step) {
  const fs::path proper = directory_ / detail::snapshot_folder_name(step);
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
  for (auto one = all.rbegin(); one != all.rend(); ++one) {
    const fs::path folder = directory_ / one->second;
    try {
      verify(*files_, folder, one->first, parts);
    } catch (const CorruptFile& error) {
      const auto older = std::next(one);
      const std::string text = fmt::format("{} is damaged: {}", folder.string(), error.what());
      if (!options_.on_damaged || older == all.rend()) {
        throw CorruptFile(fmt::format("SnapshotStore.load_latest: {}; remove that folder to {}", text,
                                      older == all.rend() ? "start anew, as there is no older snapshot"
                                                          : fmt::format("resume from step {}", older->first)));
      }
      options_.on_damaged(one->first, text);
      continue;
    }
    for (const auto& [name, part] : parts) {
      part.load(detail::read_snapshot_part(folder, name));
    }
    return one->first;
  }
  return std::nullopt;
}

std::vector<SnapshotStore::Snapshot> SnapshotStore::inspect() const {
  std::vector<SnapshotStore::Snapshot> result;
  for (const auto& [step, name] : snapshots()) {
    SnapshotStore::Snapshot state{.step = step, .folder = directory_ / name, .bytes = 0, .damage = ""};
    try {
      const detail::Manifest manifest = detail::read_snapshot_manifest(*files_, state.folder, step);
      for (const auto& [part, sum] : manifest.parts) {
        state.bytes += sum.bytes;
        detail::verify_snapshot_part(*files_, state.folder, part, sum);
      }
    } catch (const CorruptFile& error) {
      state.damage = error.what();
    }
    result.push_back(std::move(state));
  }
  return result;
}

fs::path SnapshotStore::set_aside(int64_t step) {
  const fs::path folder = path_of(step);
  fs::path aside = directory_ / detail::snapshot_folder_name(step);
  aside += kDamaged;
  files_->remove_all(aside);
  files_->rename(folder, aside);
  files_->sync_directory(directory_);
  return aside;
}

}  // namespace snug
