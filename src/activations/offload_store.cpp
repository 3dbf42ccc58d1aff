// How saved tensors leave memory and come back
//
// Problem: a saved tensor's memory is wanted during forward, and its values in backward. A transfer needs the memory
// until the transfer is complete, so many transfers at a time would need as much memory as no offload. A transfer may
// fail, and a failure must never make a wrong gradient.
//
// Options, and the choice in each:
// - When to copy: at the save, or later. Later, at the next operator that does not write to the tensor, because
//   autograd's alias sees uncounted writes (late_copies.h).
// - What to move: a saved tensor, or its storage. The storage, once, however many tensors on the storage are saved
//   (offload.cpp).
// - Destination: CPU storages go to a file (offload_spill.cpp, spill_file.cpp), because host memory must shrink.
//   Storages of accelerators go to pinned host memory, whose copies run beside the computation (offload_pinned.cpp).
//   Other devices' storages stay.
// - Transfers at a time: two. A third transfer waits.
// - What to load ahead: backward asks in reverse order of saving, so the storage saved before the storage in use
//   (offload.cpp).
//
// Consequences: a slow disk makes forward wait, and memory does not grow. A storage stays in memory, and is counted in
// report(), if its transfer out fails or the cap has no room. A storage that cannot be read back is an error in
// backward.

#include "src/activations/offload_store.h"

#include <mutex>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <unistd.h>

namespace snug::detail {
namespace {

void add(SaveOnHost::Report& sum, const SaveOnHost::Report& one) {
  sum.bytes_out += one.bytes_out;
  sum.bytes_back += one.bytes_back;
  sum.bytes_kept += one.bytes_kept;
  sum.failed_writes += one.failed_writes;
  sum.failure = one.failure.empty() ? sum.failure : one.failure;
}

// After fork() a child has no thread for the file, and the file belongs to the parent. So a child gets a store of its
// own.
class ByDevice final : public OffloadStore {
 public:
  explicit ByDevice(OffloadOptions options) : options_(std::move(options)) {
    if (!options_.directory.empty()) {
      on_cpu_ = make_spill_store(options_);
    }
  }

  ~ByDevice() override { leave_to_parent(); }

  std::unique_ptr<StoredAway> store(const c10::Storage& storage) override {
    OffloadStore* const of_device = of(storage.device());
    return of_device == nullptr ? nullptr : of_device->store(storage);
  }

 private:
  SaveOnHost::Report transfers() const override {
    const std::lock_guard lock(mutex_);
    SaveOnHost::Report sum;
    for (const auto* store : {on_cpu_.get(), on_accelerators_.get()}) {
      if (store != nullptr) {
        add(sum, store->report());
      }
    }
    return sum;
  }

  OffloadStore* of(c10::Device device) {
    const std::lock_guard lock(mutex_);
    if (device.is_cpu()) {
      leave_to_parent();
      return (on_cpu_ ? on_cpu_ : on_cpu_ = make_spill_store(options_)).get();
    }
    if (at::isAccelerator(device.type())) {
      return (on_accelerators_ ? on_accelerators_ : on_accelerators_ = make_pinned_store(options_)).get();
    }
    return nullptr;
  }

  // In a child the parent's store is never destroyed: graphs that the parent made may need the store, and the store's
  // destructor would wait for a thread that the child does not have.
  void leave_to_parent() {
    const pid_t now = ::getpid();
    if (std::exchange(process_, now) != now) {
      (void)on_cpu_.release();
    }
  }

  const OffloadOptions options_;
  mutable std::mutex mutex_;  // guards the following members
  pid_t process_ = ::getpid();
  std::unique_ptr<OffloadStore> on_cpu_;
  std::unique_ptr<OffloadStore> on_accelerators_;
};

}  // namespace

void OffloadStore::count_failure(int64_t bytes, const std::string& why) {
  const std::lock_guard lock(failures_mutex_);
  add(failures_, {.bytes_kept = bytes, .failed_writes = 1, .failure = why});
}

SaveOnHost::Report OffloadStore::report() const {
  SaveOnHost::Report sum = transfers();
  const std::lock_guard lock(failures_mutex_);
  add(sum, failures_);
  return sum;
}

std::unique_ptr<OffloadStore> make_offload_store(const OffloadOptions& options) {
  return std::make_unique<ByDevice>(options);
}

std::unique_ptr<OffloadStore> make_offload_store(const OffloadLink& link) {
  OffloadOptions options{.min_bytes = Bytes(0)};
  if (link.kind == OffloadLink::Kind::File) {
    options.directory = spill_folder(link.directory);
  }
  return make_offload_store(options);
}

}  // namespace snug::detail
