#pragma once
// TapeListener: is told of every event on an OpTape.

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/planner/profile.h"

namespace snug::detail {

/// TapeRecorder implements TapeListener.
class TapeListener {
 public:
  virtual ~TapeListener() = default;
  virtual void on_storage(int storage, int64_t bytes, bool is_external) = 0;
  virtual void before_operator() = 0;
  /// `made`: the storages whose version 0 is among the writes, with the addresses of the bytes.
  virtual void after_operator(plan::Operator&& op, const std::vector<std::pair<int, const void*>>& made) = 0;
  /// The operator made and wrote nothing.
  virtual void after_view() = 0;
  virtual void on_drop(int storage) = 0;
  /// An operator gave the storage other memory, which is not among `made`. The storage will never be rebuilt.
  virtual void on_resized(int storage) = 0;
  virtual void on_unpack(int storage) = 0;
  virtual void after_unpack() = 0;
  virtual void on_done(int storage) = 0;
  /// Follows on_done(): the custom function that had asked for the storage goes on with the storage's memory, at
  /// `data`.
  virtual void on_given_away(int storage, const void* data) = 0;
  /// Autograd saves a tensor on the storage.
  virtual void on_pack(int storage) = 0;
  /// Autograd released a saved tensor on the storage without a request from the backward pass. Or the program has let
  /// go of values that a backward pass inside the forward pass had from the storage.
  virtual void on_unused(int storage) = 0;
  /// A backward pass inside the forward pass, or inside another backward pass, asks for the storage for the first time.
  /// The storage counts as dropped when the last tensor on the storage is released, and as never unpacked.
  virtual void on_asked_inside(int storage) = 0;
  virtual void before_replay() = 0;
  virtual void after_replay() = 0;
};

}  // namespace snug::detail
