#pragma once
// SnapshotStore: the state that a run needs to go on after a crash, in numbered folders. Only complete snapshots ever
// exist. It knows names and tensors, never optimizers.
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
// SnapshotStore. It refers to x, which must outlive it.
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

#include "snug/file_system.h"
#include "snug/state.h"

namespace snug {

struct SnapshotOptions {
  /// The number of newest snapshots that stay; older ones are removed after each save. Three are enough for most runs:
  /// one to go on from and two to fall back on. Keep more to look back. At least 1.
  int keep = 3;
  /// Called by load_latest, with step and reason, for each snapshot that is damaged; then the next older one is loaded.
  /// Empty: a damaged newest snapshot is an error.
  std::function<void(int64_t step, const std::string& reason)> on_damaged = {};
};

/// A snapshot as it lies on the disk.
struct SnapshotState {
  int64_t step = 0;
  std::filesystem::path folder;
  int64_t bytes = 0;   ///< of its parts, as its manifest has them; 0 without a manifest that can be read
  std::string damage;  ///< empty: it is whole
};

/// `directory`/step-00000120/ holds manifest.json (format version, step, size and CRC-32 of every file) and one
/// NAME.safetensors for each Stateful. That file has its tensors under their dotted names with their dtypes, and all
/// other values, and the order, as JSON in the metadata ("snug.state"). Only one process may save at a time; any number
/// may load.
class SnapshotStore {
 public:
  /// Touches nothing yet: save() creates the directory. `files` must outlive this object.
  /// Throws ConfigError if keep is below 1.
  explicit SnapshotStore(std::filesystem::path directory, SnapshotOptions options = {},
                         FileSystem& files = FileSystem::real());

  /// Writes the state of all parts as the snapshot of this step, replacing one of the same step. Removes snapshots
  /// beyond `keep` and leftovers of crashed saves. If anything fails, or the process dies at any time, load_latest
  /// finds a complete snapshot: this one or the one before. Names consist of letters, digits, '_', '-' and '.'. Throws
  /// ConfigError for other names, for a step that is negative or before the newest snapshot's, and for state that
  /// cannot be stored; Error if the file system fails.
  void save(int64_t step, const std::map<std::string, Stateful>& parts);

  /// Loads the newest snapshot's state into `parts` and returns its step. Returns nullopt, and loads nothing, if there
  /// is no snapshot. Parts of the snapshot that are not in `parts` are skipped. All files are verified before the first
  /// part is loaded. The tensors that a part receives lie in the file, not in tensor memory: clone those that must
  /// stay. Throws CorruptFile, naming the folder and the cure, if the snapshot is damaged and there is no on_damaged,
  /// or if none is whole; ConfigError if it lacks one of `parts`; and the exceptions of the parts if their state does
  /// not fit. After an older one than the newest was loaded, set_aside() the others before the next save().
  std::optional<int64_t> load_latest(const std::map<std::string, Stateful>& parts) const;

  /// The step of the newest snapshot.
  std::optional<int64_t> latest() const;

  /// All snapshots, the oldest first, with every file read and compared with its checksum.
  std::vector<SnapshotState> inspect() const;

  /// Renames the folder of this step's snapshot to *.damaged, which it returns: it is no snapshot any more, and stays
  /// for people to look at. An earlier one of that name is removed.
  std::filesystem::path set_aside(int64_t step);

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

/// Copies take as much CPU tensor memory as the state, within any MemoryLimit, until they are written. Methods may be
/// called by one thread, and by nobody else on the store while a save is under way.
class AsyncSnapshots {
 public:
  struct Report {
    int64_t saved = 0;              ///< snapshots
    int64_t at_once = 0;            ///< of these, those that there was no memory to copy for
    double training_seconds = 0;    ///< in save() and wait()
    double background_seconds = 0;  ///< of the thread
    /// "10 snapshots took 0.20 s of training, and 1.10 s beside it".
    std::string str() const;
  };

  /// `store` must outlive this object.
  explicit AsyncSnapshots(SnapshotStore& store);
  /// Waits. The error of a save for which nobody has waited is lost.
  ~AsyncSnapshots();
  AsyncSnapshots(const AsyncSnapshots&) = delete;
  AsyncSnapshots& operator=(const AsyncSnapshots&) = delete;

  /// Waits for the save before, copies the state of all parts, and returns while it is written. Where there is no
  /// memory for the copies, the snapshot is written before it returns. Throws as SnapshotStore::save does, for this
  /// save or the one before; after an error of the one before, this save was not begun.
  void save(int64_t step, const std::map<std::string, Stateful>& parts);

  /// Until nothing is under way. Throws what the save has thrown.
  void wait();

  /// Of the saves that were waited for.
  const Report& report() const { return report_; }

 private:
  void finish();

  SnapshotStore& store_;
  std::future<double> under_way_;  // gives its seconds
  Report report_;
};

}  // namespace snug

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

/// Parameters and buffers under their names in the module. A tensor that is registered under several names (tied
/// weights) is stored once, under the first. Loading copies in place, so optimizers keep the same tensors. It throws
/// CorruptFile, and has changed nothing, if a name is missing or unknown, or if a shape or dtype differs; the message
/// names the parameter.
Stateful stateful(torch::nn::Module& module);

/// For a StatefulOptimizer, its own state_dict. For all other optimizers, the archive that torch itself saves, as one
/// uint8 tensor "archive". The archive includes the learning rates, loads only in C++, and does not have the same bytes
/// in every process, because torch writes addresses into it. Taking the state throws ConfigError if torch cannot save
/// it, as happens to LBFGS in the middle of its work. Loading throws CorruptFile, and has changed nothing, if the state
/// belongs to another kind of optimizer or to parameters of other sizes.
Stateful stateful(torch::optim::Optimizer& optimizer);

/// GradScaler, EMA, your own types.
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
