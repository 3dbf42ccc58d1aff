#pragma once
// What the values in a checkpointed region are, told alike in its forward and in its recomputation: by the operators that made them, of which
// values from outside. The numbers of calls would not tell: a table that the forward makes and remembers, the recomputation finds.

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "snug/activations/detail/operator_traits.h"

namespace snug::detail {

/// Of a storage, its address; of a tensor without one, such as a sparse one, the tensor's.
using MemoryName = const void*;
inline MemoryName memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? static_cast<MemoryName>(tensor.storage().unsafeGetStorageImpl())
                              : tensor.unsafeGetTensorImpl();
}

/// Keeps the address of some memory from being given to other memory; does not hold the memory.
class MemoryAddress {
 public:
  explicit MemoryAddress(const at::Tensor& tensor)
      : storage_(tensor.has_storage() ? tensor.storage().getWeakStorageImpl() : WeakStorage(Storage())),
        tensor_((tensor.has_storage() ? at::Tensor() : tensor).getIntrusivePtr()) {}
  bool is_alive() const { return storage_.use_count() > 0 || tensor_.use_count() > 0; }

 private:
  using Storage = c10::intrusive_ptr<c10::StorageImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  WeakStorage storage_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;  // of one without a storage
};

/// How what is in some memory came about: a hash of operators, and of what from outside they began with. 0: it cannot be told. The lowest bit says
/// whether it began with anything from outside, or with numbers alone, as a table of positions does.
using Origin = uint64_t;

/// What a recomputation knows from the forward.
struct KnownMemory {
  struct Memory {
    MemoryAddress address;
    Origin origin;
    int64_t first;  // the offset from which others are counted
  };
  struct Input {
    Origin origin;
    int64_t offset;  // in memory that it may share with inputs before it
    std::vector<int64_t> strides;
  };
  std::unordered_map<MemoryName, Memory> memory;  // from outside, as it was met; and the region's own that outlived it
  std::vector<Input> inputs;
  std::unordered_set<Origin> of_numbers_alone;  // of the calls in the forward
};

/// The memory that a region comes across in one run, which of it came into being there, and the origins of what it holds.
class RegionValues {
 public:
  /// In the forward: fills `known`.
  explicit RegionValues(KnownMemory& known) : known_(known), learnt_(&known) {}
  /// In a recomputation.
  explicit RegionValues(const KnownMemory& known) : known_(known) {}

  void add_inputs(const std::vector<at::Tensor>& inputs);
  /// The forward is over.
  void close();

  bool is_own(const at::Tensor& tensor) const;
  /// Whether it is of a sparse tensor from outside, as values() gives it.
  bool is_part_of_sparse(const at::Tensor& tensor) const;
  /// Of what the tensor shows of its memory. As origins, 0 is equal to none, but contradicts none either.
  Origin origin_of(const at::Tensor& tensor);
  /// From now on `copy` is the region's own, and what is written to it counts as written to `original`.
  void use_for(const at::Tensor& copy, const at::Tensor& original);

  /// A call of an operator.
  struct Call {
    Origin origin;
    c10::SmallVector<uint32_t, 2> written;  // places
    bool shows_sparse;                      // the parts of a tensor from outside
  };
  Call enter(const c10::OperatorHandle& op, const OperatorTraits& traits, const Arguments& arguments,
             const std::vector<size_t>& written);
  /// Its results are on the stack. Returns whether any is in new memory, and all have a storage.
  bool leave(const Call& call, const Stack& stack, size_t first_result);

  /// Calls f(tensor) for each tensor from outside that the operator reads without writing it.
  template <class F>
  void visit_reads_from_outside(const OperatorTraits& traits, const Arguments& arguments,
                                const std::vector<size_t>& written, F&& f) const;

 private:
  struct Place {
    MemoryAddress address;
    Origin origin;
    int64_t first = 0;
    bool is_part_of_sparse = false;
  };
  struct Name {
    uint32_t place;
    bool is_own;
  };

  uint32_t place_of(const at::Tensor& tensor);
  uint32_t add(const at::Tensor& tensor, bool is_own, Origin origin, int64_t first = 0);
  uint32_t meet(const at::Tensor& tensor);
  Origin shown(const Place& place, const at::Tensor& tensor) const;
  Origin operand(const at::Tensor& tensor, bool is_written);

  const KnownMemory& known_;
  KnownMemory* learnt_ = nullptr;  // null in a recomputation
  ska::flat_hash_map<MemoryName, Name> names_;
  std::vector<Place> places_;
};

template <class F>
void RegionValues::visit_reads_from_outside(const OperatorTraits& traits, const Arguments& arguments,
                                            const std::vector<size_t>& written, F&& f) const {
  if (traits.is_view || traits.reads_no_values) {
    return;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (std::find(written.begin(), written.end(), i) == written.end()) {
      visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
        if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() && !is_own(tensor)) {
          f(tensor);
        }
      });
    }
  }
}

/// Stands for a call by its operator and by the kinds and sizes of its operands alone. Not those of results that it is given, which it may resize.
Origin origin_by_sizes(const c10::OperatorHandle& op, const Arguments& arguments);

/// Names the calls of one run: by their origins, by the numbers among their arguments, and which one it is of those that are alike.
class CallKeys {
 public:
  /// 0 for a call whose origin cannot be told.
  uint64_t next(Origin origin, const Arguments& arguments);

 private:
  std::unordered_map<uint64_t, uint64_t> calls_;
};

}  // namespace snug::detail
