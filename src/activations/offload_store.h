#pragma once
// The stores for storages of SaveOnHost and Rematerialize: a class for each kind of device, and a class that chooses
// among the stores. offload_store.cpp says how storages leave and come back.

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
  /// Returns a new storage each time, with the same bytes, on the same device.
  virtual c10::Storage load() = 0;
  /// Begins to load, if the device has memory for the storage.
  virtual void prefetch() = 0;
  virtual void drop_prefetch() = 0;
  /// Waits until the store no longer keeps the original storage in memory, and returns true. Returns false if the
  /// storage could not be written; the original storage then stays in memory as long as this object lives.
  virtual bool finish() = 0;
};

/// Any thread may use a store.
class OffloadStore {
 public:
  virtual ~OffloadStore() = default;
  /// Returns nullptr if the store has no room. The result does not keep `storage` in memory once the transfer is
  /// complete.
  virtual std::unique_ptr<StoredAway> store(const c10::Storage& storage) = 0;
  /// Counts for report(): `bytes` stayed in memory because store() or finish() threw.
  void count_failure(int64_t bytes, const std::string& why);
  SaveOnHost::Report report() const;

 private:
  virtual SaveOnHost::Report transfers() const = 0;

  mutable std::mutex failures_mutex_;
  SaveOnHost::Report failures_;
};

/// A store that passes each storage to the store of its device. On devices that are neither the CPU nor an accelerator
/// nothing is stored. The file is made at once if `directory` is given, otherwise with the first CPU storage.
std::unique_ptr<OffloadStore> make_offload_store(const OffloadOptions& options);
/// A store for plans; takes storages of any size. If the link leads to a file, the file is made at once: throws Error
/// if the file cannot be made.
std::unique_ptr<OffloadStore> make_offload_store(const OffloadLink& link);
/// A store for CPU storages: a file.
std::unique_ptr<OffloadStore> make_spill_store(const OffloadOptions& options, SpillCalls& calls = SpillCalls::real());
/// A store for storages of accelerators: pinned host memory.
std::unique_ptr<OffloadStore> make_pinned_store(const OffloadOptions& options);

}  // namespace snug::detail
