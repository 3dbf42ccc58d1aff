#pragma once
// Where SaveOnHost puts storages: one class for each kind of device.

#include <memory>

#include <c10/core/Storage.h>

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
};

/// store() is called by the thread that runs the forward, all else by any thread.
class OffloadStore {
 public:
  virtual ~OffloadStore() = default;
  /// nullptr: no room. What it returns does not keep `storage`, once the transfer is complete.
  virtual std::unique_ptr<StoredAway> store(const c10::Storage& storage) = 0;
  virtual OffloadReport report() const = 0;
};

/// For CPU storages: a file.
std::unique_ptr<OffloadStore> make_spill_store(const OffloadOptions& options);
/// For CUDA storages: pinned host memory.
std::unique_ptr<OffloadStore> make_pinned_store(const OffloadOptions& options);

}  // namespace snug::detail
