#pragma once
// Results of operators in the forward of a checkpointed region, kept by its policy for the recomputation.

#include <any>
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "src/memory/held.h"
#include "src/memory/saved_tensor_policy.h"

namespace snug::detail {

/// Identifies a call, see CallKeys (region_values.h).
using CallKey = uint64_t;

struct KeptResult {
  struct Value {
    c10::IValue as_it_is;  // a new tensor on the result's memory, or a value other than a tensor
    std::any packed = {};  // instead of `as_it_is`: the tensor, packed by `packer`
    std::optional<WriteCount> writes = {};
  };
  std::shared_ptr<SavedTensorPolicy> packer = nullptr;  // null: values stay unpacked; outlives the packed values
  std::vector<Value> values;
  std::vector<WriteCount> aliases =
      {};                 // other tensors on the result's memory with write counts of their own, such as _unsafe_view's
  bool was_read = false;  // read in the forward, before any write to the result
  std::vector<CallKey> absorbed = {};  // calls that wrote to the result, see KeptResults::absorbed

  /// `tensor` shares the result's memory: writes to the tensor are writes to the result.
  void note_alias(const at::Tensor& tensor);
  /// An operator writes to the result through a tensor with this counter.
  void expect_write(const void* counter);
  void pack();
  bool is_packed() const;
  /// Whether the result is unchanged: in the forward only operators that were seen have written to the result, and
  /// after the forward nothing has written.
  bool is_intact() const;
};

struct KeptResults {
  /// In-place calls whose effect is part of a kept result, such as the addition of a bias to a product.
  struct Absorbed {
    const KeptResult* into;
    size_t argument;  // the argument that the call returns
  };
  std::unordered_map<CallKey, KeptResult> results;
  std::unordered_map<CallKey, Absorbed> absorbed;

  KeptResult* find(CallKey key);
  void drop(CallKey key);
  /// The forward is over. Drops results that a custom function wrote to through a pointer in the forward: the function
  /// will write again.
  void close();
};

}  // namespace snug::detail
