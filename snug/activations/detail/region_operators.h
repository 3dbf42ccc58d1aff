#pragma once
// What a checkpointed region remembers of the operators of its forward, so that recomputing it gives the same values and changes nothing else:
// - of memory that was there before the region and that the forward wrote (running statistics, counters), what it held before. The
//   recomputation works on copies of that;
// - results that a policy keeps, which the recomputation takes instead of running their operators;
// - which operators ran, for messages.

#include <any>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "snug/activations/detail/operator_traits.h"
#include "snug/activations/policy.h"
#include "snug/core/rng.h"
#include "snug/memory/detail/operator_mode.h"
#include "snug/memory/detail/saved_tensor_policy.h"

namespace snug::detail {

/// What an operator returned, kept for the recomputation.
struct KeptResult {
  struct Value {
    c10::IValue as_it_is;  // a tensor of its own on the result's memory, or what is no tensor
    std::any packed = {};  // or, made by `packer` of a tensor
    std::optional<c10::VariableVersion> version = {};
    uint32_t version_at_end = 0;  // of the forward
  };
  std::vector<Value> values;
  std::shared_ptr<SavedTensorPolicy> packer = nullptr;  // null: kept as it is
  std::optional<RngState> generators_after = {};        // of an operator that draws random numbers
  bool was_read = false;                                // in the forward, before anything wrote to it

  void pack();
  /// Whether nothing has written to it since the end of the forward.
  bool is_intact() const;
};

/// The n-th call of one operator, for each operator. Places in the whole sequence would not match: a cast that autocast's cache saved the
/// forward comes back in the recomputation.
template <class T>
using ByCall = std::unordered_map<c10::OperatorHandle, std::unordered_map<size_t, T>>;

struct RegionOperators {
  /// Memory as it was, in bytes. The weak pointer keeps the address, by which it is found, from being given to another storage.
  struct Before {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    at::Tensor bytes;
  };

  std::vector<c10::OperatorHandle> sequence;
  std::unordered_map<const c10::StorageImpl*, Before> overwritten;
  ByCall<KeptResult> kept;
  /// In-place calls whose effect a kept result has already, as the addition of a bias to a product.
  struct Absorbed {
    const KeptResult* into;
    size_t argument;  // what the call returns
  };
  ByCall<Absorbed> absorbed;
};

using StorageNames = c10::SmallVector<const c10::StorageImpl*, 8>;

/// Storages that came into being in the region.
class OwnStorages {
 public:
  bool contains(const at::Tensor& tensor) const {
    return !tensor.has_storage() || own_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
  }
  void add(const at::Tensor& tensor) { own_.insert(tensor.storage().unsafeGetStorageImpl()); }

 private:
  ska::flat_hash_set<const c10::StorageImpl*> own_;
};

/// While the forward runs: fills a RegionOperators.
class ForwardOperators final : public OperatorPolicy {
 public:
  ForwardOperators(RegionOperators& record, CheckpointPolicy policy, bool preserve_rng_state)
      : record_(record), policy_(std::move(policy)), preserve_rng_state_(preserve_rng_state) {}
  void call(const OperatorCall& call, Stack& stack) override;
  /// The forward is over: from now on nothing may write to what is kept.
  void close();
  /// Whether autograd followed a write to a tensor from outside of the region. The recomputation could not help making it again.
  bool wrote_to_outside_graph() const;

 private:
  struct OutsideTensor {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())> grad_fn;  // a pointer whose kind depends on LibTorch
  };
  struct Place {
    c10::OperatorHandle op;
    size_t call;
  };
  struct KeptStorage {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that its address stays its name
    Place place;
    std::vector<Place> absorbed;
  };

  void keep_what_was_there(const at::Tensor& tensor);
  void keep_result(const OperatorTraits& traits, Place place, Keep keep, const Stack& stack, size_t first_result);
  void note_write(const c10::StorageImpl* storage, Place place, std::optional<size_t> argument);
  KeptResult* result_at(const Place& place) const;
  bool writes_to(const Place& place, const StorageNames& storages) const;

  RegionOperators& record_;
  CheckpointPolicy policy_;
  bool preserve_rng_state_;
  std::vector<OutsideTensor> written_outside_;
  OwnStorages own_;
  std::unordered_map<c10::OperatorHandle, size_t> calls_;
  std::unordered_map<const c10::StorageImpl*, KeptStorage> kept_storages_;
  std::optional<Place> to_be_packed_;  // the last result, which the next operator may still write, as a bias is added
};

/// While the recomputation runs. When it is destroyed, what was written has the version that it had before, for autograd's checks.
class RecomputeOperators final : public OperatorPolicy {
 public:
  explicit RecomputeOperators(const RegionOperators& record) : record_(record) {}
  ~RecomputeOperators() override;
  void call(const OperatorCall& call, Stack& stack) override;

  /// "after operator 7 (aten::addmm)", and, if the sequences differ before that, where.
  std::string place() const;

 private:
  bool take_kept(const c10::OperatorHandle& op, size_t call, Stack& stack);
  void redirect(const Arguments& arguments, const std::vector<size_t>& written);
  const c10::Storage* scratch_of(const at::Tensor& tensor, bool is_written);

  const RegionOperators& record_;
  OwnStorages own_;
  std::vector<c10::OperatorHandle> sequence_;
  std::unordered_map<c10::OperatorHandle, size_t> calls_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> scratch_;
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions_;
};

}  // namespace snug::detail
