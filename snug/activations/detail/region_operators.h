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

/// Of a storage, its address; of a tensor without one, such as a sparse one, the tensor's.
using MemoryName = const void*;
using MemoryNames = c10::SmallVector<MemoryName, 8>;
inline MemoryName memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? static_cast<MemoryName>(tensor.storage().unsafeGetStorageImpl())
                              : tensor.unsafeGetTensorImpl();
}

/// The n-th call of an operator.
struct OperatorPlace {
  c10::OperatorHandle op;
  size_t call;
  bool operator==(const OperatorPlace& other) const { return op == other.op && call == other.call; }
};

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
  std::vector<OperatorPlace> absorbed = {};             // calls that wrote to it, by RegionOperators::absorbed

  void pack();
  bool is_packed() const;
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
  std::unordered_map<MemoryName, Before> overwritten;
  ByCall<KeptResult> kept;
  /// In-place calls whose effect a kept result has already, as the addition of a bias to a product.
  struct Absorbed {
    const KeptResult* into;
    size_t argument;  // what the call returns
  };
  ByCall<Absorbed> absorbed;
};

/// What came into being in the region.
class OwnMemory {
 public:
  bool contains(const at::Tensor& tensor) const { return own_.count(memory_of(tensor)) > 0; }
  void add(const at::Tensor& tensor) { own_.insert(memory_of(tensor)); }

 private:
  ska::flat_hash_set<MemoryName> own_;
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
  /// Whether it wrote to a tensor from outside that has no storage which could be copied, such as a sparse one.
  bool wrote_to_outside_sparse() const { return wrote_to_outside_sparse_; }

 private:
  struct OutsideTensor {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())> grad_fn;  // a pointer whose kind depends on LibTorch
  };
  struct KeptStorage {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that its address stays its name
    OperatorPlace place;
  };

  void keep_what_was_there(const at::Tensor& tensor);
  void keep_result(const OperatorTraits& traits, OperatorPlace place, Keep keep, const Stack& stack,
                   size_t first_result);
  void note_write(MemoryName memory, OperatorPlace place, std::optional<size_t> argument);
  KeptResult* result_at(const OperatorPlace& place) const;
  bool writes_to(const OperatorPlace& place, const MemoryNames& storages) const;

  RegionOperators& record_;
  CheckpointPolicy policy_;
  bool preserve_rng_state_;
  std::vector<OutsideTensor> written_outside_;
  bool wrote_to_outside_sparse_ = false;
  OwnMemory own_;
  std::unordered_map<c10::OperatorHandle, size_t> calls_;
  std::unordered_map<MemoryName, KeptStorage> kept_storages_;
  std::optional<OperatorPlace>
      to_be_packed_;  // the last one kept; the next operator may still write it, as a bias is added
};

/// Thrown through the callable to end a recomputation early. Not a std::exception: user code should not catch it. It must not pass
/// through a backward pass that the callable started: the engine counts on std::exception for keeping its books.
struct RecomputedEnough {};

/// While the recomputation runs. When it is destroyed, what was written has the version that it had before, for autograd's checks.
class RecomputeOperators final : public OperatorPolicy {
 public:
  explicit RecomputeOperators(const RegionOperators& record) : record_(record) {}
  ~RecomputeOperators() override;
  void call(const OperatorCall& call, Stack& stack) override;

  /// The next operator that the backward pass `task` runs throws RecomputedEnough instead. Not at once: a custom function that is about to
  /// save its own output would be left holding it, in a cycle.
  void stop_before_next(int task) { stopped_task_ = task; }

  /// "after operator 7 (aten::addmm)", and, if the sequences differ before that, where.
  std::string place() const;

 private:
  bool take_kept(const c10::OperatorHandle& op, size_t call, Stack& stack);
  void redirect(const Arguments& arguments, const std::vector<size_t>& written);
  const c10::Storage* scratch_of(const at::Tensor& tensor, bool is_written);

  const RegionOperators& record_;
  std::optional<int> stopped_task_;
  OwnMemory own_;
  std::vector<c10::OperatorHandle> sequence_;
  std::unordered_map<c10::OperatorHandle, size_t> calls_;
  std::unordered_map<MemoryName, c10::Storage> scratch_;
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions_;
};

}  // namespace snug::detail
