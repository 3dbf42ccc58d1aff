#pragma once
// The stores for storages of SaveOnHost and Rematerialize: one class for each kind of device, and one that chooses
// among them.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/Storage.h>

#include "snug/offload.h"
#include "src/core/spill_disk.h"

namespace snug::detail {

/// A storage in a store. Must not outlive its store.
class StoredAway {
 public:
  virtual ~StoredAway() = default;
  /// A storage with the same bytes, on the same device; a new one each time.
  virtual c10::Storage load() = 0;
  /// Begins to load, if there is memory for it.
  virtual void prefetch() = 0;
  virtual void drop_prefetch() = 0;
  /// Waits until the original storage is no longer held, and returns true. Returns false if it could not be written;
  /// the storage is then held as long as this object lives.
  virtual bool finish() = 0;
};

/// Thread-safe.
class OffloadStore {
 public:
  virtual ~OffloadStore() = default;
  /// Returns nullptr if there is no room. The result does not hold `storage` once the transfer is complete.
  virtual std::unique_ptr<StoredAway> store(const c10::Storage& storage) = 0;
  /// For report(): `bytes` stayed in memory because store() or finish() threw.
  void count_failure(int64_t bytes, const std::string& why);
  OffloadReport report() const;

 private:
  virtual OffloadReport transfers() const = 0;

  mutable std::mutex failures_mutex_;
  OffloadReport failures_;
};

/// A store that passes each storage to the store of its device. On devices that are neither the CPU nor an
/// accelerator nothing is stored.
/// The file is made at once if `directory` is given, otherwise with the first CPU storage.
std::unique_ptr<OffloadStore> make_offload_store(const OffloadOptions& options);
/// For plans; takes storages of any size. The file of a link to one is made at once: throws Error if it cannot be made.
std::unique_ptr<OffloadStore> make_offload_store(const OffloadLink& link);
/// For CPU storages: a file.
std::unique_ptr<OffloadStore> make_spill_store(const OffloadOptions& options, SpillCalls& calls = SpillCalls::real());
/// For storages of accelerators: pinned host memory.
std::unique_ptr<OffloadStore> make_pinned_store(const OffloadOptions& options);

}  // namespace snug::detail
