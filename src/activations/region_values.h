#pragma once
// The identity of values in a checkpointed region, equal in forward and recomputation: the operators that made a value,
// and the values from outside at the beginning. Numbers of calls would not be equal: the recomputation finds a table
// ready that the forward made and stored. See region_operators.cpp.

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "src/activations/operator_traits.h"
#include "src/core/has_bytes.h"

namespace snug::detail {

/// The address of a storage or, for a tensor without bytes of its own (such as a sparse tensor), of the tensor.
using MemoryName = const void*;
inline MemoryName memory_of(const at::Tensor& tensor) {
  return has_bytes(tensor) ? static_cast<MemoryName>(tensor.storage().unsafeGetStorageImpl())
                           : tensor.unsafeGetTensorImpl();
}

/// Keeps other memory from getting the address of some memory; does not keep the memory alive.
class MemoryAddress {
 public:
  explicit MemoryAddress(const at::Tensor& tensor)
      : storage_(has_bytes(tensor) ? tensor.storage().getWeakStorageImpl() : WeakStorage(Storage())),
        tensor_((has_bytes(tensor) ? at::Tensor() : tensor).getIntrusivePtr()) {}
  bool is_alive() const { return storage_.use_count() > 0 || tensor_.use_count() > 0; }

 private:
  using Storage = c10::intrusive_ptr<c10::StorageImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  WeakStorage storage_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;  // of a tensor without bytes
};

/// The origin of the content of some memory: a hash of the operators that made the content and of the values from
/// outside at their beginning. 0: unknown. The lowest bit says whether the origin has any value from outside, or only
/// numbers, as in a table of positions.
using Origin = uint64_t;

/// The forward's record of memory, for the recomputation.
struct KnownMemory {
  struct Memory {
    MemoryAddress address;
    Origin origin;
    int64_t first;  // offsets count from this offset
  };
  struct Input {
    Origin origin;
    int64_t offset;  // the offset in memory, which the input may share with earlier inputs
    std::vector<int64_t> strides;
  };
  std::unordered_map<MemoryName, Memory> memory;  // from outside, at first use; and own memory that outlived the region
  std::vector<Input> inputs;
  std::unordered_set<Origin> of_numbers_alone;  // origins of calls in the forward
};

/// The memory that a region meets in one run: whether the region made the memory, and the origins of the content.
class RegionValues {
 public:
  /// Fills `known` during the forward.
  explicit RegionValues(KnownMemory& known) : known_(known), learnt_(&known) {}
  /// Uses `known` in a recomputation.
  explicit RegionValues(const KnownMemory& known) : known_(known) {}

  void add_inputs(const std::vector<at::Tensor>& inputs);
  /// Ends the forward: the record gets the region's own memory that is still alive.
  void close();

  bool is_own(const at::Tensor& tensor) const;
  /// Whether the tensor is a part of a sparse tensor from outside, such as its values().
  bool is_part_of_sparse(const at::Tensor& tensor) const;
  /// The origin of the part of memory that the tensor shows. An origin of 0 is equal to no origin, but contradicts no
  /// origin either.
  Origin origin_of(const at::Tensor& tensor);
  /// From now on `copy` is the region's own, and writes to `copy` count as writes to `original`.
  void use_for(const at::Tensor& copy, const at::Tensor& original);

  /// A call of an operator.
  struct Call {
    Origin origin;
    c10::SmallVector<uint32_t, 2> written;  // indices in places_
    bool shows_sparse;                      // the call returns parts of a sparse tensor from outside
  };
  Call enter(const c10::OperatorHandle& op, const OperatorTraits& traits, const Arguments& arguments,
             const std::vector<size_t>& written);
  /// The results of the call are on the stack. Returns whether any result is in new memory, and all results have bytes.
  bool leave(const Call& call, const Stack& stack, size_t first_result);

  /// Calls f(tensor) for each tensor from outside that the operator reads and does not write.
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

/// Identifies a call only by its operator and by the kinds and sizes of its operands. Preallocated results, which the
/// operator may resize, do not count.
Origin origin_by_sizes(const c10::OperatorHandle& op, const Arguments& arguments);

/// Identifies the calls of one run: by their origins, by the numbers among their arguments, and by their order among
/// alike calls.
class CallKeys {
 public:
  /// Returns the key of the next call; 0 for a call of unknown origin.
  uint64_t next(Origin origin, const Arguments& arguments);

 private:
  std::unordered_map<uint64_t, uint64_t> calls_;
};

}  // namespace snug::detail
