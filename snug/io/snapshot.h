#pragma once
// SnapshotStore: what a run needs to go on after a crash, as numbered folders of which only whole
// ones ever exist. Knows names and tensors, never optimizers.
//
//   snug::SnapshotStore snapshots(run / "snapshots", {.keep = 3});
//   const std::map<std::string, snug::Stateful> parts{
//       {"model", snug::stateful(model)}, {"optimizer", snug::stateful(optimizer)}};
//   int64_t step = snapshots.load_latest(parts).value_or(0);
//   snapshots.save(step, parts);

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "snug/core/file_system.h"
#include "snug/core/state.h"

namespace snug {

struct SnapshotOptions {
  /// The newest so many stay, older ones are removed after each save. One to go on from and two to
  /// fall back on is enough for most; more if you want to look back. At least 1.
  int keep = 3;
};

/// <directory>/step-00000120/ holds manifest.json (format version, step, size and CRC-32 of every
/// file) and one <name>.safetensors for each Stateful: its tensors under their dotted names with
/// their dtypes, all else, and the order, as JSON in the metadata ("snug.state"). One process at a
/// time may save; any number may load what is there.
class SnapshotStore {
 public:
  /// Touches nothing yet: save() creates the directory. `files` must outlive this object.
  /// Throws ConfigError if keep is below 1.
  explicit SnapshotStore(std::filesystem::path directory, SnapshotOptions options = {},
                         FileSystem& files = FileSystem::real());

  /// Writes the state of all parts as the snapshot of this step, replacing one of the same step,
  /// and removes what is too old and what crashed saves left behind. Whatever fails, and whenever
  /// the process dies: what load_latest finds is whole, either this snapshot or the one before.
  /// Names consist of letters, digits, '_', '-' and '.'. Throws ConfigError for other names, a
  /// step that is negative or before the newest snapshot's, or state that cannot be stored; Error
  /// where the file system fails.
  void save(int64_t step, const std::map<std::string, Stateful>& parts);

  /// Gives the newest snapshot's state to `parts` and returns its step; nullopt, and nothing is
  /// loaded, if there is none. Parts that the snapshot holds and `parts` does not are left alone.
  /// All files are verified before the first part is given anything. The tensors that a part is
  /// given lie in the file, not in tensor memory: clone what is to stay.
  /// Throws CorruptFile, naming the folder and the cure, if the snapshot is damaged; ConfigError
  /// if it lacks one of `parts`; and what the parts throw when their state does not fit.
  std::optional<int64_t> load_latest(const std::map<std::string, Stateful>& parts) const;

  /// The step of the newest snapshot.
  std::optional<int64_t> latest() const;

  /// The folder of this step's snapshot, whether or not there is one.
  std::filesystem::path path_of(int64_t step) const;

 private:
  std::map<int64_t, std::string> snapshots() const;
  void clean_up();
  void write_parts(const std::filesystem::path& folder, int64_t step, const std::map<std::string, Stateful>& parts);
  void publish(const std::filesystem::path& folder, int64_t step);
  void prune();

  std::filesystem::path directory_;
  SnapshotOptions options_;
  FileSystem* files_;
};

}  // namespace snug
