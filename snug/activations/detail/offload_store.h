#pragma once
// Where SaveOnHost and Rematerialize put storages: one class for each kind of device, and one for them all.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/Storage.h>

#include "snug/activations/detail/spill_disk.h"
#include "snug/activations/offload.h"

namespace snug::detail {

/// A storage that is elsewhere. Must not outlive its store.
class StoredAway {
 public:
  virtual ~StoredAway() = default;
  /// A storage with the same bytes, on the same device; a new one each time.
  virtual c10::Storage load() = 0;
  /// Begins to load, if there is memory for it.
  virtual void prefetch() = 0;
  virtual void drop_prefetch() = 0;
  /// Waits until the storage that it was made of is not held any more: true. False: it could not be written, and is held as long as
  /// this lives.
  virtual bool finish() = 0;
};

/// Thread-safe.
class OffloadStore {
 public:
  virtual ~OffloadStore() = default;
  /// nullptr: no room. What it returns does not keep `storage`, once the transfer is complete.
  virtual std::unique_ptr<StoredAway> store(const c10::Storage& storage) = 0;
  /// For report(): somebody kept so much in memory because store() or finish() threw.
  void count_failure(int64_t bytes, const std::string& why);
  OffloadReport report() const;

 private:
  virtual OffloadReport transfers() const = 0;

  mutable std::mutex failures_mutex_;
  OffloadReport failures_;
};

/// For each storage the one of its device; on devices other than CPU and CUDA nothing is stored. The file is made at once if `directory` is
/// given, else with the first CPU storage.
std::unique_ptr<OffloadStore> make_offload_store(const OffloadOptions& options);
/// For plans, whatever the size. The file is made at once: throws Error if it cannot be.
std::unique_ptr<OffloadStore> make_offload_store(const OffloadLink& link);
/// For CPU storages: a file.
std::unique_ptr<OffloadStore> make_spill_store(const OffloadOptions& options, SpillCalls& calls = SpillCalls::real());
/// For CUDA storages: pinned host memory.
std::unique_ptr<OffloadStore> make_pinned_store(const OffloadOptions& options);

}  // namespace snug::detail
