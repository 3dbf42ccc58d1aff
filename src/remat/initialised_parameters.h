#pragma once
// InitialisedParameters: finds parameters that the forward pass of a model makes, or writes, when it is called first
// and not again: lazy modules, initialisation by the first batch. Planning calls it several times, and cannot put back
// that it was called.

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "src/remat/effect_journal.h"
#include "src/remat/op_tape.h"

namespace snug::detail {

class InitialisedParameters {
 public:
  /// Throws ConfigError if an earlier run made one of `leaves`, or wrote it where this run has not.
  void check(const std::vector<at::Tensor>& leaves, const EffectJournal& journal) const;
  /// The run is over, or has failed.
  void note(const OpTape& tape, const EffectJournal& journal);

 private:
  // As long as it is remembered, no other memory has its address.
  using Memories = std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>>;
  Memories made_, written_;
};

}  // namespace snug::detail
