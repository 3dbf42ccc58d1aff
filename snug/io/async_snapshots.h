#pragma once
// AsyncSnapshots: saves into a SnapshotStore while training goes on.
//
//   snug::SnapshotStore snapshots(run / "snapshots");
//   snug::AsyncSnapshots saving(snapshots);
//   saving.save(step, parts);     // copies the state; a thread writes it
//   ...
//   saving.wait();                // until it is on the disk

#include <cstdint>
#include <future>
#include <map>
#include <string>

#include "snug/core/state.h"
#include "snug/io/snapshot.h"

namespace snug {

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
