#include "snug/activations/offload.h"

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
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "snug/activations/detail/kept_elsewhere.h"
#include "snug/activations/detail/offload_store.h"
#include "snug/core/error.h"
#include "snug/memory/detail/not_adopted.h"
#include "snug/memory/detail/saved_tensor_policy.h"

namespace snug {
namespace {

using detail::OffloadStore;
using detail::StoredAway;

// What the model owns, or the caller's batch. A copy elsewhere would free nothing.
bool is_held_anyway(const at::Tensor& tensor) {
  return tensor.is_view() ? tensor._base().is_leaf() : tensor.is_leaf() && tensor.requires_grad();
}

// Of a plain tensor nothing is lost that sizes, strides and the like do not tell; sparse, quantized and wrapped ones are classes of their own.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && tensor.has_storage() && tensor.dim() > 0;
}

// -1: outside of a backward pass.
int current_pass() { return torch::autograd::get_current_graph_task_id(); }

class OffloadPolicy;

// One storage as it was when it was saved, shared by all tensors on it that were saved then.
struct SavedStorage : std::enable_shared_from_this<SavedStorage> {
  OffloadPolicy& policy;  // outlives it: the hooks hold both
  c10::weak_intrusive_ptr<c10::StorageImpl> original;
  uint32_t version;
  std::unique_ptr<StoredAway> away;
  uint64_t turn = 0;  // when it was last saved; backward asks for the latest first
  // What was given out in a backward pass is given out again in that pass, for several views of it. Not later: autograd may have made a
  // gradient of it, to which it adds.
  struct Here {
    c10::Storage storage;
    c10::VariableVersion version;  // of all tensors on it
    int pass;
    bool is_good() const { return pass >= 0 && pass == current_pass() && version.current_version() == 0; }
  };
  std::optional<Here> here = {};
  int last_pass = -1;  // that asked for it

  SavedStorage(OffloadPolicy& owner, const c10::Storage& storage, uint32_t saved_version,
               std::unique_ptr<StoredAway> stored)
      : policy(owner), original(storage.getWeakStorageImpl()), version(saved_version), away(std::move(stored)) {}
  ~SavedStorage();
};

// The storages for which something was done last, so that it is undone for older ones.
class LastFew final {
 public:
  explicit LastFew(size_t number) : number_(number) {}

  // Gives the one that is no longer among them.
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

// A saved tensor: a view of its storage.
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

  // Without the dispatcher: no mode that watches operators is to see it.
  at::Tensor on(const SavedStorage::Here& memory) const {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.storage), keys, dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    torch::autograd::impl::set_version_counter(tensor, memory.version);
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

  std::any pack(const at::Tensor& tensor) override {
    if (is_plain(tensor) && !is_held_anyway(tensor)) {
      if (auto storage = storage_of(tensor)) {
        detail::mark_as_saved(tensor);
        return SavedView(std::move(storage), tensor);
      }
    }
    return tensor.detach();
  }

  at::Tensor unpack(std::any& packed) override {
    if (const auto* kept = std::any_cast<at::Tensor>(&packed)) {
      return detail::not_adopted(*kept);
    }
    const auto& view = std::any_cast<SavedView&>(packed);
    at::Tensor tensor = view.on(bring_back(view.storage));
    detail::mark_as_saved(tensor);
    return tensor;
  }

  void forget(const SavedStorage& saved) {
    const std::lock_guard lock(mutex_);
    turns_.erase(saved.turn);
    const auto found = known_.find(saved.original._unsafe_get_target());
    if (found != known_.end() && found->second == &saved) {
      known_.erase(found);
    }
  }

  OffloadReport report() const { return store_->report(); }

 private:
  // nullptr: it stays where it is.
  std::shared_ptr<SavedStorage> storage_of(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    if (bytes < std::max<int64_t>(1, options_.min_bytes.count())) {
      return nullptr;
    }
    const auto version = static_cast<uint32_t>(tensor._version());
    if (auto saved = known(storage, version)) {
      return saved;
    }
    auto away = store_->store(storage);
    if (!away) {
      return nullptr;
    }
    auto saved = std::make_shared<SavedStorage>(*this, storage, version, std::move(away));
    const std::lock_guard lock(mutex_);
    known_[storage.unsafeGetStorageImpl()] = saved.get();
    is_last_now(*saved);
    return saved;
  }

  // The address is a storage's name: it is not given to another one while there is a weak pointer to it.
  std::shared_ptr<SavedStorage> known(const c10::Storage& storage, uint32_t version) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(storage.unsafeGetStorageImpl());
    if (found == known_.end() || found->second->version != version) {
      return nullptr;
    }
    auto saved = found->second->weak_from_this().lock();
    if (saved) {
      turns_.erase(saved->turn);
      is_last_now(*saved);
    }
    return saved;
  }

  void is_last_now(SavedStorage& saved) {
    saved.turn = next_turn_++;
    turns_[saved.turn] = &saved;
  }

  SavedStorage::Here bring_back(const std::shared_ptr<SavedStorage>& saved) {
    std::optional<SavedStorage::Here> here = still_here(*saved);
    if (!here) {
      here = {.storage = saved->away->load(), .version = c10::VariableVersion(0), .pass = current_pass()};
    }
    std::shared_ptr<SavedStorage> next, too_old, too_far_ahead;  // let go of without the lock
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
    if (too_far_ahead) {
      too_far_ahead->away->drop_prefetch();
    }
    if (next) {
      next->away->prefetch();
    }
    return *here;
  }

  std::optional<SavedStorage::Here> still_here(const SavedStorage& saved) const {
    const std::lock_guard lock(mutex_);
    return saved.here && saved.here->is_good() ? saved.here : std::nullopt;
  }

  // What backward is likely to ask for next: of what it has not asked for yet, the one that was saved last before.
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
  mutable std::mutex mutex_;                                // guards what follows
  std::map<const c10::StorageImpl*, SavedStorage*> known_;  // each takes itself out when it dies, of both
  std::map<uint64_t, SavedStorage*> turns_;
  uint64_t next_turn_ = 1;
  LastFew here_{2};   // an operation may ask for a storage, another one, and the first again
  LastFew ahead_{2};  // or in another order than that of saving
};

SavedStorage::~SavedStorage() { policy.forget(*this); }

}  // namespace

std::shared_ptr<detail::SavedTensorPolicy> detail::offload_packer() {
  static const auto packer = std::make_shared<OffloadPolicy>(OffloadOptions{});
  return packer;
}

std::string OffloadReport::str() const {
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
      : policy_(std::make_shared<OffloadPolicy>(std::move(options))), scope_(policy_) {}

  OffloadReport report() const { return policy_->report(); }

 private:
  std::shared_ptr<OffloadPolicy> policy_;
  detail::PolicyScope scope_;
};

SaveOnHost::SaveOnHost(OffloadOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
SaveOnHost::~SaveOnHost() = default;

OffloadReport SaveOnHost::report() const { return impl_->report(); }

}  // namespace snug
