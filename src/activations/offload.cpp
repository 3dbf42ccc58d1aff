// This file decides which tensors leave, and when they come back. late_copies.h decides when a copy is made;
// offload_store.cpp tells the whole idea, and how files and pinned memory work.

#include "snug/offload.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include "snug/core.h"
#include "src/activations/late_copies.h"
#include "src/activations/offload_store.h"
#include "src/core/has_bytes.h"
#include "src/memory/saved_tensor_policy.h"

namespace snug {
namespace {

using detail::OffloadStore;
using detail::StoredAway;

// Whether the tensor belongs to the model or to the caller's batch. Offloading such a tensor would free nothing.
bool is_held_anyway(const at::Tensor& tensor) {
  return tensor.is_view() ? tensor._base().is_leaf() : tensor.is_leaf() && tensor.requires_grad();
}

// A plain tensor is fully described by its memory, sizes, strides and the like. Quantized and nested tensors have
// classes of their own.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && detail::has_bytes(tensor) && tensor.dim() > 0;
}

class OffloadPolicy;

// A storage, shared by all saved tensors on the storage.
class SavedStorage final : public detail::LateCopy, public std::enable_shared_from_this<SavedStorage> {
 public:
  // The storage that was given out in a backward pass. The same pass gets the same storage again, for several views. A
  // later pass gets another storage, because somebody may have written to this storage.
  struct Here {
    c10::Storage storage;
    c10::VariableVersion version;  // shared by all tensors on the storage
    int pass;
    bool is_good() const { return pass >= 0 && pass == detail::current_pass() && version.current_version() == 0; }
  };

  SavedStorage(OffloadPolicy& policy, detail::LateCopies& copies, const at::Tensor& tensor)
      : LateCopy(copies, tensor), policy_(policy) {}
  ~SavedStorage() override;

  // The memory itself if the storage did not leave; otherwise nothing.
  c10::Storage still_in_memory() const {
    const std::lock_guard lock(mutex);
    return memory();
  }
  // Returns nullptr if the storage did not leave.
  std::shared_ptr<StoredAway> away() const {
    const std::lock_guard lock(mutex);
    return away_;
  }

  // The policy's mutex guards the next three members.
  uint64_t turn = 0;  // the number of the last save; backward asks for the latest save first
  std::optional<Here> here = {};
  int last_pass = -1;  // the last backward pass that asked for the storage

 private:
  bool copy(const c10::Storage& memory) override;
  void forget() override;

  OffloadPolicy& policy_;  // outlives this object: the hooks own both
  std::shared_ptr<StoredAway> away_;
};

// The storages of the last few requests; the caller undoes older requests.
class LastFew final {
 public:
  explicit LastFew(size_t number) : number_(number) {}

  // Adds a storage. Returns the storage that is no longer among the last few, if any.
  std::shared_ptr<SavedStorage> add(const std::shared_ptr<SavedStorage>& saved) {
    const auto is_saved = [&](const auto& one) { return !one.owner_before(saved) && !saved.owner_before(one); };
    std::erase_if(few_, [&](const auto& one) { return one.expired() || is_saved(one); });
    few_.push_back(saved);
    if (few_.size() <= number_) {
      return nullptr;
    }
    auto oldest = few_.front().lock();
    few_.erase(few_.begin());
    return oldest;
  }

 private:
  size_t number_;
  std::vector<std::weak_ptr<SavedStorage>> few_;
};

// A saved tensor is a view of its storage.
struct SavedView {
  std::shared_ptr<SavedStorage> storage;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset;

  SavedView(std::shared_ptr<SavedStorage> saved, const at::Tensor& t)
      : storage(std::move(saved)),
        keys(t.key_set()),
        dtype(t.dtype()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        offset(t.storage_offset()) {}

  // Makes the tensor without the dispatcher: no mode that watches operators may see the tensor.
  at::Tensor on(c10::Storage memory, const c10::VariableVersion& version) const {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(memory), keys, dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    torch::autograd::impl::set_version_counter(tensor, version);
    return tensor;
  }
};

class OffloadPolicy final : public detail::SavedTensorPolicy {
 public:
  explicit OffloadPolicy(OffloadOptions options) : options_(std::move(options)) {
    if (options_.cap < options_.min_bytes) {
      throw ConfigError(
          fmt::format("SaveOnHost: cap is {} and min_bytes is {}, so that nothing could leave; give a larger cap",
                      options_.cap.str(), options_.min_bytes.str()));
    }
    store_ = detail::make_offload_store(options_);
  }

  // The caller shows the operators of this thread to the result.
  detail::LateCopies& copies() { return copies_; }

  std::any pack(const at::Tensor& tensor) override {
    const int64_t least = std::max<int64_t>(1, options_.min_bytes.count());
    if (!is_plain(tensor) || static_cast<int64_t>(tensor.storage().nbytes()) < least || is_held_anyway(tensor)) {
      return tensor.detach();
    }
    detail::mark_as_saved(tensor);
    return SavedView(storage_of(tensor), tensor);
  }

  at::Tensor unpack(std::any& packed) override {
    if (const auto* kept = std::any_cast<at::Tensor>(&packed)) {
      return *kept;
    }
    const auto& view = std::any_cast<SavedView&>(packed);
    view.storage->make();
    if (const c10::Storage memory = view.storage->still_in_memory()) {
      return view.on(memory, c10::VariableVersion(0));
    }
    const SavedStorage::Here here = bring_back(view.storage);
    at::Tensor tensor = view.on(here.storage, here.version);
    detail::mark_as_saved(tensor);
    return tensor;
  }

  std::shared_ptr<StoredAway> store(const c10::Storage& memory) { return store_->store(memory); }

  void forget_here(SavedStorage& saved) {
    std::optional<SavedStorage::Here> here;  // released after the lock
    const std::lock_guard lock(mutex_);
    here = std::exchange(saved.here, {});
  }

  void forget(const SavedStorage& saved) {
    const std::lock_guard lock(mutex_);
    turns_.erase(saved.turn);
  }

  SaveOnHost::Report report() const { return store_->report(); }

 private:
  std::shared_ptr<SavedStorage> storage_of(const at::Tensor& tensor) {
    auto saved = std::static_pointer_cast<SavedStorage>(copies_.find(tensor));
    if (saved == nullptr) {
      saved = std::make_shared<SavedStorage>(*this, copies_, tensor);
      copies_.add(saved);
    }
    const std::lock_guard lock(mutex_);
    turns_.erase(saved->turn);
    is_last_now(*saved);
    return saved;
  }

  void is_last_now(SavedStorage& saved) {
    saved.turn = next_turn_++;
    turns_[saved.turn] = &saved;
  }

  SavedStorage::Here bring_back(const std::shared_ptr<SavedStorage>& saved) {
    std::optional<SavedStorage::Here> here = still_here(*saved);
    if (!here) {
      const auto away = saved->away();
      here = {.storage = away ? away->load() : saved->still_in_memory(),
              .version = c10::VariableVersion(0),
              .pass = detail::current_pass()};
    }
    std::shared_ptr<SavedStorage> next, too_old, too_far_ahead;  // released after the lock
    std::optional<SavedStorage::Here> not_needed;
    {
      const std::lock_guard lock(mutex_);
      saved->here = here;
      saved->last_pass = here->pass;
      too_old = here_.add(saved);
      if (too_old) {
        not_needed = std::exchange(too_old->here, {});
      }
      next = next_after(*saved);
      if (next) {
        too_far_ahead = ahead_.add(next);
      }
    }
    if (const auto away = too_far_ahead ? too_far_ahead->away() : nullptr) {
      away->drop_prefetch();
    }
    if (const auto away = next ? next->away() : nullptr) {
      away->prefetch();
    }
    return *here;
  }

  std::optional<SavedStorage::Here> still_here(const SavedStorage& saved) const {
    const std::lock_guard lock(mutex_);
    return saved.here && saved.here->is_good() ? saved.here : std::nullopt;
  }

  // Returns the storage that backward is likely to ask for next: the storage saved last before `saved`, without
  // storages that this pass has asked for already.
  std::shared_ptr<SavedStorage> next_after(const SavedStorage& saved) const {
    for (auto next = turns_.lower_bound(saved.turn); next != turns_.begin();) {
      SavedStorage& candidate = *(--next)->second;
      if (candidate.last_pass < 0 || candidate.last_pass != saved.last_pass) {
        if (auto alive = candidate.weak_from_this().lock()) {
          return alive;
        }
      }
    }
    return nullptr;
  }

  const OffloadOptions options_;
  std::unique_ptr<OffloadStore> store_;
  detail::LateCopies copies_;
  mutable std::mutex mutex_;                 // guards the following members
  std::map<uint64_t, SavedStorage*> turns_;  // a destructor removes its own entry
  uint64_t next_turn_ = 1;
  LastFew here_{2};   // 2, because an operation may ask for a storage, another storage, and the first again
  LastFew ahead_{2};  // 2, because backward may ask in another order than the order of saving
};

SavedStorage::~SavedStorage() { policy_.forget(*this); }

bool SavedStorage::copy(const c10::Storage& memory) {
  away_ = policy_.store(memory);
  return away_ != nullptr;
}

void SavedStorage::forget() {
  policy_.forget_here(*this);
  away_.reset();
}

}  // namespace

std::string SaveOnHost::Report::str() const {
  std::string text =
      fmt::format("{} of activations went out, {} came back", Bytes(bytes_out).str(), Bytes(bytes_back).str());
  if (failed_writes > 0) {
    text += fmt::format("\nwarning: {} tensors stayed in memory: {}", failed_writes, failure);
  }
  return text;
}

class SaveOnHost::Impl {
 public:
  explicit Impl(OffloadOptions options)
      : policy_(std::make_shared<OffloadPolicy>(std::move(options))),
        copies_(policy_->copies()),
        operators_(copies_),
        saved_(policy_) {}
  ~Impl() { copies_.make_all(); }

  SaveOnHost::Report report() const { return policy_->report(); }

 private:
  std::shared_ptr<OffloadPolicy> policy_;
  detail::LateCopies& copies_;
  detail::OperatorScope operators_;
  detail::PolicyScope saved_;
};

SaveOnHost::SaveOnHost(OffloadOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
SaveOnHost::~SaveOnHost() = default;

SaveOnHost::Report SaveOnHost::report() const { return impl_->report(); }

}  // namespace snug
