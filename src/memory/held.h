#pragma once
// Whether a tensor still has the value of an earlier moment. This header is the only definition of "the same value",
// for the tape and for offload.
//
// Problem: code that keeps a tensor's memory, or a copy of a tensor, must detect a write to the tensor in the meantime.
// Options: compare the bytes, or compare counts of writes. Bytes would have to be copied or hashed for each save.
// Choice: four things identify a value:
// - its storage;
// - the counter of its writes. Views and detached aliases share the counter of their base. Parts from `unsafe_chunk`,
//   `.data()` and `from_blob` of the same memory have a counter each, so an equal count does not prove that the storage
//   was left alone;
// - the count;
// - the operators that have written to the storage since, if operators are seen (operator_mode.h). Autograd does not
//   count two kinds of writes by operators at all: writes through another counter, and writes to arguments that a
//   kernel fills, such as RReLU's noise.
//
// Consequence: if the count moved and no operator explains the move, somebody wrote through a pointer. Custom functions
// write through pointers before the functions call mark_dirty.

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Autograd's count of the writes to a tensor, and the part of the count that seen operators explain. The object shares
/// the tensor's counter, so the count moves on with the tensor. The object does not keep the tensor's memory alive.
class WriteCount final {
 public:
  /// The count of no tensor: the count never moves. The count of an inference tensor never moves either, because nobody
  /// counts an inference tensor's writes.
  WriteCount() = default;
  explicit WriteCount(const at::Tensor& tensor);
  /// The count of a tensor of whose writes exactly `known` are accepted.
  WriteCount(const at::Tensor& tensor, uint32_t known) : WriteCount(tensor) { known_ = known; }

  /// The identity of the counter; nullptr without a counter. Tensors that share a counter count each other's writes.
  const void* counter() const;
  static const void* counter_of(const at::Tensor& tensor);
  uint32_t now() const { return counter_.enabled() ? counter_.current_version() : 0; }

  /// Announces a write by a seen operator, through `writes` arguments with this counter. The operator is about to
  /// write, or has just written and autograd has not counted the write yet. Autograd counts none or all of these
  /// arguments.
  void expect(uint32_t writes = 1);
  /// Whether the count moved by more than the announced writes, since the construction or the last accept().
  bool moved() const { return moved_ || now() - known_ > expected_; }
  /// Accepts all writes until now.
  void accept();

 private:
  c10::VariableVersion counter_;
  uint32_t known_ = 0;
  uint32_t expected_ = 0;
  bool moved_ = false;
};

}  // namespace snug::detail
