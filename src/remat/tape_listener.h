#pragma once
// TapeListener: is told of everything that happens on an OpTape.

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/profile.h"

namespace snug::detail {

/// See TapeRecorder.
class TapeListener {
 public:
  virtual ~TapeListener() = default;
  virtual void on_storage(int storage, int64_t bytes, bool is_external) = 0;
  virtual void before_operator() = 0;
  /// `made`: storages whose version 0 is among the writes.
  virtual void after_operator(ProfiledOperator&& op, const std::vector<std::pair<int, const void*>>& made) = 0;
  /// It made and wrote nothing.
  virtual void after_view() = 0;
  virtual void on_drop(int storage) = 0;
  /// An operator gave it other memory, which is not among what was `made`. It will never be rebuilt.
  virtual void on_resized(int storage) = 0;
  virtual void on_unpack(int storage) = 0;
  virtual void after_unpack() = 0;
  virtual void on_done(int storage) = 0;
  /// After on_done: the custom function that had asked for it goes on with its memory, at `data`.
  virtual void on_given_away(int storage, const void* data) = 0;
  /// Autograd saves a tensor on it.
  virtual void on_pack(int storage) = 0;
  /// A saved tensor on it was released and not asked for by the backward pass; or the program has let go of what a
  /// backward pass inside the forward pass had from there.
  virtual void on_unused(int storage) = 0;
  /// For the first time, a backward pass inside another asks for it, or one inside the forward pass: it counts as
  /// dropped when the last tensor on it is released, and as never unpacked.
  virtual void on_asked_inside(int storage) = 0;
  virtual void before_replay() = 0;
  virtual void after_replay() = 0;
};

}  // namespace snug::detail
