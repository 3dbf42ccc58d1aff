#pragma once
// InitialisedParameters: finds parameters that a model's forward pass makes or writes at the first call and not at
// later calls: lazy modules, initialisation by the first batch. Planning calls the forward pass several times, and
// cannot undo the first call.

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "src/remat/effect_journal.h"
#include "src/remat/op_tape.h"

namespace snug::detail {

class InitialisedParameters {
 public:
  /// Throws ConfigError if an earlier run made one of `leaves`, or wrote to one of `leaves` and this run has not.
  void check(const std::vector<at::Tensor>& leaves, const EffectJournal& journal) const;
  /// Notes a run that is over or has failed.
  void note(const OpTape& tape, const EffectJournal& journal);

 private:
  // While an entry exists, no other memory gets the entry's address.
  using Memories = std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>>;
  Memories made_, written_;
};

}  // namespace snug::detail
