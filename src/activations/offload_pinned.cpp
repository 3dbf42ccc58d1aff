#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "snug/state.h"
#include "src/activations/offload_store.h"
#include "src/activations/spill_extents.h"
#include "src/activations/storage_views.h"

// How an accelerator's storages wait in pinned memory (a store of offload_store.cpp)
//
// Problem: copies should overlap with computation, and memory must not be reused before a copy has read the memory.
//
// Options: the host waits for copies, or streams wait.
//
// Choice: streams wait. Copies run on two side streams of each device, a stream out and a stream back. A copy out waits
// for the copies back from pinned memory that was given back, so given-back pinned memory is free for the next copy at
// once. Device memory is allocated and released in the order of the computing stream. The computing stream waits for a
// copy before memory that the copy uses is released.
//
// Consequence: the allocator may hand device memory out again at once, however far the host is ahead.

namespace snug::detail {
namespace {

using c10::impl::VirtualGuardImpl;

c10::Event recorded_on(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

// Pinned memory takes long to allocate, so this class allocates slabs: one slab of `cap` bytes or, without a cap, as
// many slabs of 256 MiB as are needed. LibTorch's allocator keeps the slabs for the next guard.
class Slabs final {
 public:
  struct Place {
    size_t slab;
    int64_t offset;
    at::Tensor bytes;
  };

  explicit Slabs(Bytes cap) : cap_(cap) {}

  std::optional<Place> take(int64_t bytes) {
    for (size_t i = 0; i < slabs_.size(); ++i) {
      if (const auto offset = slabs_[i].extents.take(bytes)) {
        return Place{i, *offset, slabs_[i].memory.narrow(0, *offset, bytes)};
      }
    }
    if (!cap_.is_unlimited() && (!slabs_.empty() || bytes > cap_.count())) {
      return std::nullopt;
    }
    const int64_t size = cap_.is_unlimited() ? std::max(bytes, kSlabBytes) : cap_.count();
    slabs_.push_back({at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true)), SpillExtents(size)});
    return take(bytes);
  }

  void give_back(const Place& place) { slabs_[place.slab].extents.give_back(place.offset, place.bytes.numel()); }

 private:
  static constexpr int64_t kSlabBytes = int64_t{256} << 20;
  struct Slab {
    at::Tensor memory;
    SpillExtents extents;
  };
  Bytes cap_;
  std::vector<Slab> slabs_;
};

class PinnedStore final : public OffloadStore {
 public:
  explicit PinnedStore(const OffloadOptions& options) : slabs_(options.cap) {}
  ~PinnedStore() override { retire(0); }

  std::unique_ptr<StoredAway> store(const c10::Storage& storage) override;

 private:
  class Pinned;
  SaveOnHost::Report transfers() const override {
    const std::lock_guard lock(mutex_);
    return report_;
  }

  struct Transfer {
    c10::Storage storage;
    c10::Stream stream;  // the computing stream
    c10::Event done;
  };
  // The most storages that stay in memory because their copy may not be complete.
  static constexpr size_t kInFlight = 2;

  struct Side {
    c10::Stream out, back;
    std::vector<c10::Event> read = {};  // the last reads of pinned memory that was given back
  };

  Side& side_of(c10::Device device) {
    auto found = sides_.find(device);
    if (found == sides_.end()) {
      const VirtualGuardImpl of(device.type());
      found =
          sides_.emplace(device, Side{of.getStreamFromGlobalPool(device), of.getStreamFromGlobalPool(device)}).first;
    }
    return found->second;
  }

  // Copies on `side`, after all work that `computing` has been given so far.
  static c10::Event copy(const at::Tensor& from, const at::Tensor& to, const c10::Stream& computing,
                         const c10::Stream& side) {
    recorded_on(computing).block(side);
    const c10::StreamGuard guard(side);
    to.copy_(from, /*non_blocking=*/true);
    return recorded_on(side);
  }

  c10::Event copy_out(const at::Tensor& from, const at::Tensor& place, const c10::Stream& computing) {
    Side& side = side_of(computing.device());
    for (const auto& [device, other] : sides_) {  // the pinned memory may have been another device's
      if (device != computing.device()) {
        recorded_on(other.out).block(side.out);
        recorded_on(other.back).block(side.out);
      }
    }
    for (const c10::Event& event : side.read) {
      event.block(side.out);
    }
    side.read.clear();
    return copy(from, place, computing, side.out);
  }

  c10::Event copy_back(const at::Tensor& place, const at::Tensor& to, const c10::Stream& computing) {
    const Side& side = side_of(computing.device());
    recorded_on(side.out).block(side.back);
    return copy(place, to, computing, side.back);
  }

  void retire(size_t but) {
    for (; in_flight_.size() > but; in_flight_.pop_front()) {
      in_flight_.front().done.block(in_flight_.front().stream);
    }
  }

  mutable std::mutex mutex_;  // guards all following members
  Slabs slabs_;
  std::map<c10::Device, Side, decltype([](c10::Device a, c10::Device b) { return a.index() < b.index(); })> sides_;
  std::deque<Transfer> in_flight_;
  size_t sent_ = 0;  // the number of storages so far
  SaveOnHost::Report report_;
};

class PinnedStore::Pinned final : public StoredAway {
 public:
  Pinned(PinnedStore& store, c10::Device device, Slabs::Place place)
      : store_(store), device_(device), place_(std::move(place)), number_(store.sent_) {}

  ~Pinned() override {
    drop_prefetch();
    const std::lock_guard lock(store_.mutex_);
    store_.retire(0);  // the memory that was copied is no longer needed
    if (read_) {
      store_.side_of(device_).read.push_back(std::move(*read_));
    }
    store_.slabs_.give_back(place_);
  }

  c10::Storage load() override {
    const at::NoGradGuard no_grad;
    const std::lock_guard lock(store_.mutex_);
    if (!ahead_) {
      begin();
    }
    const c10::Stream computing = stream();
    ahead_->done.block(computing);
    const c10::Storage storage = ahead_->bytes.storage();
    if (computing != ahead_->stream) {  // the order of release then differs from the order of allocation
      VirtualGuardImpl(device_.type()).recordDataPtrOnStream(storage.data_ptr(), computing);
    }
    store_.report_.bytes_back += place_.bytes.numel();
    forget_ahead();
    return storage;
  }

  void prefetch() override {
    const at::NoGradGuard no_grad;
    const std::lock_guard lock(store_.mutex_);
    try {
      if (!ahead_) {
        begin();
      }
    } catch (const c10::Error& error) {
      if (!is_out_of_memory(error)) {  // out of memory: load() will need the memory, and throw
        throw;
      }
    }
  }

  void drop_prefetch() override {
    const std::lock_guard lock(store_.mutex_);
    if (ahead_) {
      ahead_->done.block(ahead_->stream);
      forget_ahead();
    }
  }

  bool finish() override {
    const std::lock_guard lock(store_.mutex_);
    store_.retire(store_.sent_ - number_);  // storages that went out later may stay in memory
    return true;
  }

 private:
  struct Ahead {
    at::Tensor bytes;
    c10::Stream stream;  // the stream of the allocation
    c10::Event done;
  };

  c10::Stream stream() const { return VirtualGuardImpl(device_.type()).getStream(device_); }

  void begin() {
    store_.retire(0);  // backward needs the room
    const c10::Stream computing = stream();
    const at::Tensor bytes = at::empty_like(place_.bytes, at::TensorOptions(device_).pinned_memory(false));
    ahead_.emplace(Ahead{bytes, computing, store_.copy_back(place_.bytes, bytes, computing)});
  }

  void forget_ahead() {
    read_.emplace(std::move(ahead_->done));
    ahead_.reset();
  }

  PinnedStore& store_;
  c10::Device device_;
  Slabs::Place place_;
  size_t number_;  // the storage's number among the storages that went out
  std::optional<Ahead> ahead_;
  std::optional<c10::Event> read_;  // the end of the last copy from the pinned memory
};

std::unique_ptr<StoredAway> PinnedStore::store(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  auto place = slabs_.take(bytes);
  if (!place) {
    report_.bytes_kept += bytes;
    return nullptr;
  }
  const c10::Stream computing = VirtualGuardImpl(storage.device_type()).getStream(storage.device());
  try {
    in_flight_.push_back({storage, computing, copy_out(storage_bytes(storage), place->bytes, computing)});
  } catch (...) {
    slabs_.give_back(*place);
    throw;
  }
  ++sent_;
  retire(kInFlight);
  report_.bytes_out += bytes;
  return std::make_unique<Pinned>(*this, storage.device(), std::move(*place));
}

}  // namespace

std::unique_ptr<OffloadStore> make_pinned_store(const OffloadOptions& options) {
  return std::make_unique<PinnedStore>(options);
}

}  // namespace snug::detail
