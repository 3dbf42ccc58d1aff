#pragma once
// What a tensor held at one moment, and whether it holds it still: the one place that says by what such a moment is known, for checkpoints, kept
// results, offload, compression and tape.
//
// A value is known by four things:
// - its storage;
// - who counts its writes. Views and detached aliases share the counter of their base. Parts from `unsafe_chunk`, `.data()` and `from_blob` of the
//   same memory have one each, so a count alone says nothing of the storage;
// - the count;
// - the operators that wrote to the storage since, where operators are seen (operator_mode.h). Some of these autograd does not count at
//   all: those through another counter, and arguments that a kernel fills, such as RReLU's noise.
//
// A count that moved with no operator to explain it is a write through a pointer, as custom functions make before they say mark_dirty.

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace snug::detail {

/// Autograd's count of the writes to a tensor, which moves on with the tensor, and the part of it that operators explain. Shares the tensor's
/// counter and does not hold its memory.
class WriteCount final {
 public:
  /// Of nothing, and of inference tensors, whose writes nobody counts: it never moves.
  WriteCount() = default;
  explicit WriteCount(const at::Tensor& tensor);
  /// Of a tensor that has been seen to count `known` writes, not more.
  WriteCount(const at::Tensor& tensor, uint32_t known) : WriteCount(tensor) { known_ = known; }

  /// Which counter it is; nullptr if there is none. Tensors that share it count each other's writes.
  const void* counter() const;
  static const void* counter_of(const at::Tensor& tensor);
  uint32_t now() const { return counter_.enabled() ? counter_.current_version() : 0; }

  /// An operator that is seen is about to write, or has just written and autograd has not counted it yet: through `writes` arguments with this
  /// counter. Autograd counts none or all of them.
  void expect(uint32_t writes = 1);
  /// Whether it moved otherwise, since it was made or since accept().
  bool moved() const { return moved_ || now() - known_ > expected_; }
  /// Takes what it is now for what is known.
  void accept();

 private:
  c10::VariableVersion counter_;
  uint32_t known_ = 0;
  uint32_t expected_ = 0;
  bool moved_ = false;
};

}  // namespace snug::detail
