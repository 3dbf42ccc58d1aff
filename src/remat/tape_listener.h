#pragma once
// TapeListener: is told of every event on an OpTape. TapeRecorder makes a profile of the events.

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/planner/profile.h"

namespace snug::detail {

/// Each function does nothing unless overridden. TapeRecorder overrides all of them.
class TapeListener {
 public:
  virtual ~TapeListener() = default;
  virtual void on_storage(int /*storage*/, int64_t /*bytes*/, bool /*is_external*/) {}
  virtual void before_operator() {}
  /// `made`: the storages whose version 0 is among the writes, with the addresses of the bytes.
  virtual void after_operator(plan::Operator&& /*op*/, const std::vector<std::pair<int, const void*>>& /*made*/) {}
  /// The operator made and wrote nothing.
  virtual void after_view() {}
  virtual void on_drop(int /*storage*/) {}
  /// An operator gave the storage other memory, which is not among `made`. The storage will never be rebuilt.
  virtual void on_resized(int /*storage*/) {}
  virtual void on_unpack(int /*storage*/) {}
  virtual void after_unpack() {}
  virtual void on_done(int /*storage*/) {}
  /// Follows on_done(): the custom function that had asked for the storage goes on with the storage's memory, at
  /// `data`.
  virtual void on_given_away(int /*storage*/, const void* /*data*/) {}
  /// Autograd saves a tensor on the storage.
  virtual void on_pack(int /*storage*/) {}
  /// Autograd released a saved tensor on the storage without a request from the backward pass. Or the program has let
  /// go of values that a backward pass inside the forward pass had from the storage.
  virtual void on_unused(int /*storage*/) {}
  /// A backward pass inside the forward pass, or inside another backward pass, asks for the storage for the first time.
  /// The storage counts as dropped when the last tensor on the storage is released, and as never unpacked.
  virtual void on_asked_inside(int /*storage*/) {}
  /// From here to tape_rests() the tape itself works, not the program. No operator runs meanwhile, except in a replay.
  virtual void tape_works() {}
  virtual void tape_rests() {}
  virtual void before_replay() {}
  virtual void after_replay() {}
};

/// The tape works until the end of the scope.
class [[nodiscard]] TapeWorks {
 public:
  explicit TapeWorks(TapeListener* const& listener) : listener_(listener) { listener_->tape_works(); }
  ~TapeWorks() { listener_->tape_rests(); }
  TapeWorks(const TapeWorks&) = delete;
  TapeWorks& operator=(const TapeWorks&) = delete;

 private:
  TapeListener* const& listener_;  // of the tape, the listener may change meanwhile
};

}  // namespace snug::detail
