#pragma once
// SnapshotStore: the state that a run needs to go on after a crash, in numbered folders. Only complete snapshots ever
// exist. A store knows names and tensors, never optimizers.
//
//   snug::SnapshotStore snapshots(run / "snapshots", {.keep = 3});
//   const std::map<std::string, snug::Stateful> parts{
//       {"model", snug::stateful(model)}, {"optimizer", snug::stateful(optimizer)}};
//   int64_t step = snapshots.load_latest(parts).value_or(0);
//   snapshots.save(step, parts);
//
// AsyncSnapshots: saves into a SnapshotStore while training goes on.
//
//   snug::SnapshotStore snapshots(run / "snapshots");
//   snug::AsyncSnapshots saving(snapshots);
//   saving.save(step, parts);     // copies the state; a thread writes it
//   ...
//   saving.wait();                // until it is on the disk
//
// stateful(x): the Stateful of modules, optimizers and all objects with state_dict() and load_state_dict(), for
// SnapshotStore. The Stateful refers to x, so x must outlive the Stateful.
//
//   snapshots.save(step, {{"model", snug::stateful(model)}, {"optimizer", snug::stateful(adam)}});

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "snug/state.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

namespace detail {
class FileSystem;
struct Manifest;
}  // namespace detail

struct SnapshotOptions {
  /// The number of newest snapshots that stay. Older snapshots are removed after each save. Three are enough for most
  /// runs: one to go on from and two to fall back on. Keep more to look back. At least 1.
  int keep = 3;
  /// Called by load_latest, with step and reason, for each damaged snapshot; then the next older snapshot is loaded.
  /// Empty: a damaged newest snapshot is an error.
  std::function<void(int64_t step, const std::string& reason)> on_damaged = {};
};

/// `directory`/step-00000120/ holds manifest.json (format version, step, size and CRC-32 of every file) and one
/// NAME.safetensors for each Stateful. The file NAME.safetensors has the tensors of the Stateful under their dotted
/// names with their dtypes. All other values, and the order, are JSON in the file's metadata ("snug.state"). Only one
/// process may save at a time; any number of processes may load.
class SnapshotStore {
 public:
  /// A snapshot on the disk.
  struct Snapshot {
    int64_t step = 0;
    std::filesystem::path folder;
    int64_t bytes = 0;   ///< size of all parts, from the manifest; 0 without a readable manifest
    std::string damage;  ///< empty: the snapshot is whole
  };

  /// Touches nothing yet: save() creates the directory. Throws ConfigError if keep is below 1.
  explicit SnapshotStore(std::filesystem::path directory, SnapshotOptions options = {});
  /// For tests: `files` may fail, and must outlive the store.
  SnapshotStore(std::filesystem::path directory, SnapshotOptions options, detail::FileSystem& files);

  /// Writes the state of all parts as the snapshot of this step, replacing an earlier snapshot of the same step.
  /// Removes snapshots beyond `keep` and leftovers of crashed saves. If anything fails, or the process dies at any
  /// time, load_latest finds a complete snapshot: the new snapshot or the snapshot before. Names consist of letters,
  /// digits, '_', '-' and '.'. Throws ConfigError for other names, for a step that is negative or before the newest
  /// snapshot's step, and for state that cannot be stored. Throws Error if the file system fails.
  void save(int64_t step, const std::map<std::string, Stateful>& parts);

  /// Loads the newest snapshot's state into `parts` and returns the snapshot's step. Returns nullopt, and loads
  /// nothing, if no snapshot exists. Parts of the snapshot that are not in `parts` are skipped. All files are verified
  /// before the first part is loaded. The tensors given to a part lie in the file, not in tensor memory: clone tensors
  /// that must stay. Throws:
  /// - CorruptFile, naming the folder and the cure, if the snapshot is damaged and on_damaged is empty, or if no
  ///   snapshot is whole;
  /// - ConfigError if the snapshot lacks one of `parts`;
  /// - the exceptions of the parts if a state does not fit.
  ///
  /// If an older snapshot than the newest was loaded, set_aside() the newer snapshots before the next save().
  std::optional<int64_t> load_latest(const std::map<std::string, Stateful>& parts) const;

  /// The step of the newest snapshot.
  std::optional<int64_t> latest() const;

  /// All snapshots, the oldest first. Every file is read and compared with the file's checksum.
  std::vector<Snapshot> inspect() const;

  /// Renames the folder of this step's snapshot to *.damaged, and returns the new path. The folder no longer counts as
  /// a snapshot, and stays for people to look at. An earlier folder of the new name is removed.
  std::filesystem::path set_aside(int64_t step);

  /// The folder of this step's snapshot, whether or not the snapshot exists.
  std::filesystem::path path_of(int64_t step) const;

 private:
  std::map<int64_t, std::string> snapshots() const;
  void clean_up();
  void prepare(int64_t step, const std::map<std::string, Stateful>& parts);
  detail::Manifest write_parts(const std::filesystem::path& folder, int64_t step,
                               const std::map<std::string, Stateful>& parts);
  void write_manifest(const std::filesystem::path& folder, const detail::Manifest& manifest);
  void publish(const std::filesystem::path& folder, int64_t step);
  void prune();

  std::filesystem::path directory_;
  SnapshotOptions options_;
  detail::FileSystem* files_;
};

/// Copies take as much CPU tensor memory as the state, within any MemoryLimit, until the copies are written. Only one
/// thread may call the methods. While a save is under way, nobody else may call methods of the store.
class AsyncSnapshots {
 public:
  struct Report {
    int64_t saved = 0;              ///< number of snapshots
    int64_t at_once = 0;            ///< of these, snapshots written inside save() for lack of memory
    double training_seconds = 0;    ///< time in save() and wait()
    double background_seconds = 0;  ///< time of the thread
    /// "10 snapshots took 0.20 s of training, and 1.10 s beside it".
    std::string str() const;
  };

  /// `store` must outlive this object.
  explicit AsyncSnapshots(SnapshotStore& store);
  /// Waits for the save under way. If nobody has waited for a save, the save's error is lost.
  ~AsyncSnapshots();
  AsyncSnapshots(const AsyncSnapshots&) = delete;
  AsyncSnapshots& operator=(const AsyncSnapshots&) = delete;

  /// Waits for the previous save, copies the state of all parts, and returns while the copies are written. Without
  /// memory for the copies, the snapshot is written before save() returns. Throws as SnapshotStore::save does, for this
  /// save or the previous save. After an error of the previous save, this save was not begun. Throws ConfigError inside
  /// of ProcessGroup::save_together.
  void save(int64_t step, const std::map<std::string, Stateful>& parts);

  /// Waits until no save is under way. Throws the exception of the save.
  void wait();

  /// The report of all saves that were waited for.
  const Report& report() const { return report_; }

 private:
  void finish();

  SnapshotStore& store_;
  std::future<double> under_way_;  // gives the thread's seconds
  Report report_;
};

/// Parameters and buffers under their names in the module. A tensor that is registered under several names (tied
/// weights) is stored once, under the first name. Loading copies in place, so optimizers keep the same tensors. Loading
/// throws CorruptFile, and has changed nothing, if a name is missing or unknown, or if a shape or dtype differs; the
/// message names the parameter.
Stateful stateful(torch::nn::Module& module);

/// For a StatefulOptimizer, the optimizer's own state_dict. For all other optimizers, torch's own archive, as one uint8
/// tensor "archive". The archive includes the learning rates, loads only in C++, and does not have the same bytes in
/// every process, because torch writes addresses into the archive. Taking the state throws ConfigError if torch cannot
/// save the state, as happens to LBFGS in the middle of LBFGS's work. Loading throws CorruptFile, and has changed
/// nothing, if the state belongs to another kind of optimizer or to parameters of other sizes.
Stateful stateful(torch::optim::Optimizer& optimizer);

/// For GradScaler, Ema and your own types.
template <class T>
  requires requires(T& object, const T& constant, const StateDict& state) {
    { constant.state_dict() } -> std::convertible_to<StateDict>;
    object.load_state_dict(state);
  }
Stateful stateful(T& object) {
  return {[&object] { return StateDict(object.state_dict()); },
          [&object](const StateDict& state) { object.load_state_dict(state); }};
}

/// Module holders such as torch::nn::Linear, and shared pointers to modules.
template <class Holder>
  requires requires(Holder& holder) {
    { *holder } -> std::convertible_to<torch::nn::Module&>;
  }
Stateful stateful(Holder& holder) {
  return stateful(static_cast<torch::nn::Module&>(*holder));
}

}  // namespace snug
