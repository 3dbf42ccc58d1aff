#pragma once
// Whether a tensor still holds the value that it held at an earlier moment. This is the one definition of "the same
// value", for checkpoints, kept results, offload, compression and the tape.
//
// A value is identified by four things:
// - its storage;
// - the counter of its writes. Views and detached aliases share the counter of their base. Parts from `unsafe_chunk`,
//   `.data()` and `from_blob` of the same memory have a counter each, so an equal count does not prove that the storage
//   was left alone;
// - the count;
// - the operators that have written to the storage since, where operators are seen (operator_mode.h). Autograd does not
//   count some of these writes at all: writes through another counter, and arguments that a kernel fills, such as
//   RReLU's noise.
//
// A count that moved without an operator to explain it is a write through a pointer. Custom functions make such writes
// before they call mark_dirty.

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace snug::detail {

/// Autograd's count of the writes to a tensor, and the part of it that seen operators explain. The object shares the
/// tensor's counter, so the count moves on with the tensor, and does not hold the tensor's memory.
class WriteCount final {
 public:
  /// The count of no tensor, or of an inference tensor, whose writes nobody counts: it never moves.
  WriteCount() = default;
  explicit WriteCount(const at::Tensor& tensor);
  /// The count of a tensor of which exactly `known` writes are known.
  WriteCount(const at::Tensor& tensor, uint32_t known) : WriteCount(tensor) { known_ = known; }

  /// The identity of the counter; nullptr if there is none. Tensors that share a counter count each other's writes.
  const void* counter() const;
  static const void* counter_of(const at::Tensor& tensor);
  uint32_t now() const { return counter_.enabled() ? counter_.current_version() : 0; }

  /// Announces a write by a seen operator, through `writes` arguments with this counter. The operator is about to
  /// write, or has just written and autograd has not counted it yet. Autograd counts none or all of these arguments.
  void expect(uint32_t writes = 1);
  /// Whether the count moved by more than the announced writes, since the construction or the last accept().
  bool moved() const { return moved_ || now() - known_ > expected_; }
  /// Takes the count of now for the known count.
  void accept();

 private:
  c10::VariableVersion counter_;
  uint32_t known_ = 0;
  uint32_t expected_ = 0;
  bool moved_ = false;
};

}  // namespace snug::detail
