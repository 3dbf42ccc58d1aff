#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "snug/offload.h"
#include "src/activations/operator_traits.h"
#include "src/activations/storage_views.h"
#include "src/core/has_bytes.h"
#include "src/core/replaced.h"
#include "src/memory/backward_pass.h"
#include "src/planner/at.h"
#include "src/remat/tape_writer.h"

// A checkpointed region on a tape
//
// Problem: a region drops all results, and no trial shows which results come back with other bits. A step with a plan
// has such a trial.
//
// Options: run the callable again, as PyTorch does, and compare the two runs. Or replay the recorded operators, and
// keep each value that an operator might not make again.
//
// Choice: replay. A value belongs to the graph if an operator made the value from a tensor that requires a gradient, in
// gradient mode, which is off in custom functions. Operators make values of the graph again. Autograd forbids writes to
// values of the graph through pointers, but for custom functions, which say mark_dirty.
//
// Values outside of the graph may be written through pointers: memory of torch::zeros that a loop or a kernel fills,
// results of a custom function, copies. Such a value is kept when an operator of the graph reads the value, as if the
// value were an argument of the region. Two exceptions:
// - Random values, and values computed from random values, are made again: a dropout mask is as large as an activation.
// - Memory that an operator fills completely before any use is made again.
//
// Consequences:
// - Memory from outside (arguments, parameters, buffers) is not copied, and is read again. If the region writes such
//   memory, or values outside of the graph, after reading them, the memory is copied before the write. The copy keeps
//   the number of the old value, and the memory goes on under a new number.
// - Memory from outside is kept by the policy around the region, if there is such a policy. So a region inside another
//   region, or inside a step with a plan, does not keep the outer activations.
// - A request in backward makes the values on the way to the requested value; each stays until backward has asked for
//   all of the value's tensors. Values beside the way come later, so a pass may run an operator twice. Once a pass has
//   run as many operators as the region has, the next request makes all values that are still missing.
// - At the end of the region the tape lets go of values that no saved tensor depends on.
//
// Here are the parts of TapeWriter, TapeStorages and TapeReplays that only a region needs.

namespace snug::detail {
namespace {

bool is_all_of_its_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg() &&
         static_cast<size_t>(tensor.numel()) * tensor.itemsize() == tensor.storage().nbytes();
}

// Whether an operator that writes the argument gives every element a new value, whatever the old value was.
bool fills(const c10::OperatorHandle& op, size_t argument, const at::Tensor& tensor) {
  static const std::set<std::string> of_their_own{
      "aten::bernoulli_",  "aten::cauchy_", "aten::copy_",   "aten::exponential_", "aten::fill_", "aten::geometric_",
      "aten::log_normal_", "aten::normal_", "aten::random_", "aten::uniform_",     "aten::zero_"};
  const c10::Argument& written = op.schema().arguments()[argument];
  const bool is_noise = written.name() == "noise";  // of RReLU
  const bool overwrites = (argument == 0 && of_their_own.contains(op.schema().name())) || written.is_out() || is_noise;
  return overwrites && is_all_of_its_storage(tensor);
}

// A tensor with all of the memory: the tensor itself, the tensor that it is a view of, or the bytes.
at::Tensor all_memory_of(const at::Tensor& tensor) {
  if (is_all_of_its_storage(tensor)) {
    return tensor;
  }
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : at::Tensor();
  return base.defined() && has_bytes(base) && is_all_of_its_storage(base) ? base : storage_bytes(tensor);
}

}  // namespace

// --- operators

// Called for an operator's arguments before the operator runs.
void TapeWriter::prepare_operands(RunningOperator& running, const Arguments& arguments) {
  TapeOperator& record = running.record;
  const OperatorTraits& traits = running.traits;
  const auto visit = [&](auto&& f) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!traits.is_statistic(i) || !traits.writes(arguments, i)) {  // moved statistics are not read, see begin()
        visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) { f(tensor, i); });
      }
    }
  };
  const bool draws = traits.draws(arguments);
  bool reads_values = false;
  visit([&](const at::Tensor& tensor, size_t i) {
    const std::optional<int> known = storages_.known_number_of(tensor);
    const bool is_filled = traits.writes(arguments, i) && fills(record.op, i, tensor);
    reads_values = true;
    running.is_in_graph = running.is_in_graph || tensor.requires_grad();
    running.is_drawn =
        running.is_drawn || (known && storages_.at(*known).is_drawn && !is_filled && !traits.reads_no_values);
  });
  reads_values = reads_values && !traits.reads_no_values;
  running.is_in_graph = running.is_in_graph && reads_values && c10::GradMode::is_enabled();
  running.is_drawn = (running.is_drawn || draws) && !running.is_in_graph;
  running.makes_blank = !reads_values && !draws;
  const bool may_run_again = running.is_in_graph || running.is_drawn;
  record.is_replayable = record.is_replayable && (may_run_again || running.makes_blank);
  visit([&](const at::Tensor& tensor, size_t i) {
    if (!has_bytes(tensor) || tensor.is_inference() || !reads_values) {
      return;
    }
    const int number = storages_.number_of(tensor);
    const bool is_written = traits.writes(arguments, i);
    if (storages_.at(number).is_blank && is_written && fills(record.op, i, tensor)) {
      storages_.at(number).is_rebuildable = true;
    } else if (storages_.at(number).is_blank) {
      replays_.note_unseen_write(number);
    }
    TapeStorage& s = storages_.at(number);
    s.is_blank = false;
    s.is_read = s.is_read || (may_run_again && !is_written);
    if (running.is_in_graph && !s.is_external() && !s.is_rebuildable && !s.is_offloaded) {
      s.is_source = true;
      storages_.settle(number);
    }
  });
  const std::string& name = record.op.schema().name();
  if (state_.region->policy && running.is_in_graph && name != "aten::_to_copy") {
    running.treatment = state_.region->policy(name);
  }
}

// Called for a storage that the operator has made.
void TapeStorages::treat_result(int storage, Keep treatment) {
  TapeStorage& s = at(storage);
  if (treatment == Keep::Recompute) {
    return;
  }
  const bool is_small = s.bytes < OffloadOptions{}.min_bytes.count();
  s.is_offloaded = treatment == Keep::Offload && !is_small && s.is_counted;
  s.is_source = !s.is_offloaded;
  if (s.is_offloaded && store_ == nullptr) {
    static const std::shared_ptr<OffloadStore> store = make_offload_store(OffloadOptions{});
    store_ = store;
  }
}

// Called for a storage that the operator has written, after judge() has set is_rebuildable.
void TapeReplays::judge_in_region(const RunningOperator& running, int storage) {
  TapeStorage& s = storages_.at(storage);
  s.is_read = false;
  if (s.is_external()) {
    return;
  }
  s.is_drawn = running.is_drawn;
  s.is_source = s.is_source || (running.is_in_graph && !s.is_rebuildable && !s.is_offloaded);
  storages_.settle(storage);
}

// --- memory from outside, and writes

void TapeStorages::keep_outside(const at::Tensor& tensor, const std::shared_ptr<SavedTensorPolicy>& policy) {
  if (!has_bytes(tensor) || !is_all_of_its_storage(tensor)) {
    return;  // the tape holds the memory
  }
  const Replaced no_other_policy(state_->region->outside, std::shared_ptr<SavedTensorPolicy>());
  const int number = number_of(tensor);
  at(number).outside = std::make_shared<KeptOutside>(
      KeptOutside{policy, without_memory(tensor), policy->pack(tensor), /*is_asked_always=*/true});
  settle(number);
}

// The caller has just added the storage. A part of a leaf, as of a parameter or a data set, has its owner anyway.
void TapeStorages::pack_outside(int storage, const at::Tensor& tensor) {
  TapeStorage& s = at(storage);
  const std::shared_ptr<SavedTensorPolicy>& policy = state_->region->outside;
  if (policy == nullptr || (tensor.is_view() && tensor._base().is_leaf())) {
    s.holding.hold(tensor.storage());
    return;
  }
  const UnseenOperators unseen;
  const at::NoGradGuard no_grad;
  const at::Tensor whole = all_memory_of(tensor);
  s.outside = std::make_shared<KeptOutside>(KeptOutside{policy, without_memory(whole), policy->pack(whole)});
}

// Null: the memory was written after the region.
c10::Storage TapeStorages::from_outside(int storage) {
  if (at(storage).was_written_unseen()) {
    return {};
  }
  const UnseenOperators unseen;
  const at::NoGradGuard no_grad;
  KeptOutside& outside = *at(storage).outside;
  const at::Tensor& shape = outside.shape;
  const at::Tensor kept = outside.policy->unpack(outside.packed);
  const int64_t bytes = at(storage).bytes;
  const bool lies_as_before = kept.strides() == shape.strides() && kept.storage_offset() == shape.storage_offset() &&
                              static_cast<int64_t>(kept.storage().nbytes()) == bytes;
  c10::Storage memory = kept.storage();
  if (!lies_as_before) {
    memory = at::empty({bytes}, kept.options().dtype(at::kByte)).storage();
    on_storage(shape, memory).copy_(kept);
  }
  replace(storage, memory);
  return memory;
}

// Called for a tensor that is about to be written. Copies values that an operator has read and that cannot be made
// again. The copy takes over the storage's number. Memory from outside that is written is held by the tape: a policy
// outside has packed the values before the write.
void TapeStorages::copy_before_write(const at::Tensor& tensor) {
  if (!has_bytes(tensor) || tensor.is_inference()) {
    return;
  }
  const int number = number_of(tensor);
  if (at(number).is_lent() || (!at(number).is_external() && at(number).is_rebuildable)) {
    return;
  }
  if (!at(number).is_read) {
    at(number).outside.reset();
    settle(number);
    return;
  }
  c10::Storage copy;
  {
    const UnseenOperators unseen;
    const at::NoGradGuard no_grad;
    copy = storage_bytes(tensor).clone().storage();
  }
  TapeStorage& s = at(number);
  replace(number, copy);
  s.outside.reset();
  s.counts.clear();
  s.is_source = true;
  s.holding.hold(copy);
  const Replaced no_policy(state_->region->outside, std::shared_ptr<SavedTensorPolicy>());
  add(tensor, -1);
}

// --- the end of the region, and backward

void TapeReplays::forget_what_is_unneeded() {
  std::vector<bool> is_operand(plan::at(storages_.size()));
  for (auto op = operators_.rbegin(); op != operators_.rend(); ++op) {
    const bool runs_again = std::ranges::any_of(op->writes, [&](plan::Value value) {
      const TapeStorage& s = storages_.at(value.storage);
      const bool is_needed = s.slots > 0 || is_operand[plan::at(value.storage)];
      const bool is_kept = s.is_source || s.is_offloaded;
      return is_needed && !s.is_external() && (!is_kept || value.version < s.last_version());
    });
    if (runs_again) {
      for (const plan::Value& value : op->needs) {
        is_operand[plan::at(value.storage)] = true;
      }
    }
  }
  for (int i = 0; i < storages_.size(); ++i) {
    TapeStorage& s = storages_.at(i);
    if (!is_operand[plan::at(i)]) {
      s.is_rebuildable = s.is_rebuildable && !s.is_source;  // kept as long as a saved tensor needs the storage
      s.is_source = false;
    }
    if (!is_operand[plan::at(i)] && s.slots == 0) {
      s.is_offloaded = false;
      s.holding.put_away(nullptr);
      s.outside.reset();
      s.is_unneeded = true;
    }
    if (s.outside != nullptr && s.outside->is_asked_always) {
      s.holding.lose_sight();
    }
    storages_.settle(i);
  }
}

void TapeReplays::begin_asking() {
  if (std::exchange(asking_pass_, current_pass()) != current_pass()) {
    replayed_in_pass_ = 0;
    for (int s = 0; s < storages_.size(); ++s) {
      storages_.at(s).unasked = storages_.at(s).slots;
    }
  }
}

void TapeReplays::note_asked(int storage) {
  TapeStorage& s = storages_.at(storage);
  if (s.unasked > 0 && --s.unasked == 0) {
    s.claimed = false;
    storages_.settle(storage);
  }
}

bool TapeReplays::is_missing(int storage) {
  const TapeStorage& s = storages_.at(storage);
  return s.unasked > 0 && !s.is_external() && s.is_rebuildable && !s.is_offloaded && !storages_.find(storage);
}

// The storages to make when backward asks for `storage`, which is the first.
std::vector<int> TapeReplays::targets_with(int storage) {
  std::vector<int> targets{storage};
  const auto add = [&](int s) {
    if (s != storage && is_missing(s)) {
      targets.push_back(s);
    }
  };
  if (state_.region && state_.is_closed) {
    std::ranges::for_each(results_, add);
    const bool runs_often = replayed_in_pass_ >= std::ssize(operators_);
    for (int s = 0; runs_often && s < storages_.size(); ++s) {
      add(s);
    }
  }
  return targets;
}

// Once all values that backward will ask for are in memory, no operator runs again in this pass.
void TapeReplays::let_go_of_operands() {
  for (int s = 0; s < storages_.size(); ++s) {
    if (is_missing(s)) {
      return;
    }
  }
  for (int i = 0; i < storages_.size(); ++i) {
    TapeStorage& s = storages_.at(i);
    const bool is_result = std::ranges::find(results_, i) != results_.end();
    if (s.outside != nullptr || is_result) {
      s.claimed = s.unasked > 0;
    } else if (!state_.keeps_graph && !s.is_external()) {
      s.is_rebuildable = false;  // stays in memory, or away, until autograd lets go of the storage
    }
    s.is_source = s.is_source && state_.keeps_graph;
    storages_.settle(i);
  }
}

}  // namespace snug::detail
