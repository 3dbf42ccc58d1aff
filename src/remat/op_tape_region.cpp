#include <algorithm>
#include <memory>
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
#include "src/remat/op_tape.h"

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

namespace snug::detail {
namespace {

bool contains(const std::vector<size_t>& list, size_t i) { return std::ranges::find(list, i) != list.end(); }

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

OpTape::OpTape(TapeRegion region) : cursor_(nullptr), region_(std::move(region)), listener_(nullptr) {}

// Called for an operator's arguments before the operator runs.
void OpTape::prepare_operands(TapeOperator& record, const OperatorTraits& traits, const Arguments& arguments) {
  const std::vector<size_t> written = traits.written_by(arguments);
  const auto visit = [&](auto&& f) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (contains(traits.statistics, i) && contains(written, i)) {
        continue;  // not read, see read_arguments()
      }
      visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) { f(tensor, i); });
    }
  };
  const bool draws = traits.draws(arguments);
  bool reads_values = false;
  visit([&](const at::Tensor& tensor, size_t i) {
    const std::optional<int> known = known_number_of(tensor);
    const bool is_filled = contains(written, i) && fills(record.op, i, tensor);
    reads_values = true;
    record.is_in_graph = record.is_in_graph || tensor.requires_grad();
    record.is_drawn = record.is_drawn || (known && at(*known).is_drawn && !is_filled && !traits.reads_no_values);
  });
  reads_values = reads_values && !traits.reads_no_values;
  record.is_in_graph = record.is_in_graph && reads_values && c10::GradMode::is_enabled();
  record.is_drawn = (record.is_drawn || draws) && !record.is_in_graph;
  record.makes_blank = !reads_values && !draws;
  const bool may_run_again = record.is_in_graph || record.is_drawn;
  record.is_replayable = record.is_replayable && (may_run_again || record.makes_blank);
  visit([&](const at::Tensor& tensor, size_t i) {
    if (!has_bytes(tensor) || tensor.is_inference() || !reads_values) {
      return;
    }
    const int number = number_of(tensor);
    const bool is_written = contains(written, i);
    if (at(number).is_blank && is_written && fills(record.op, i, tensor)) {
      at(number).is_rebuildable = true;
    } else if (at(number).is_blank) {
      note_unseen_write(number);
    }
    TapeStorage& s = at(number);
    s.is_blank = false;
    s.is_read = s.is_read || (may_run_again && !is_written);
    if (record.is_in_graph && !s.is_external() && !s.is_rebuildable && !s.is_offloaded) {
      s.is_source = true;
      settle(number);
    }
  });
  const std::string& name = record.op.schema().name();
  if (region_->policy && record.is_in_graph && name != "aten::_to_copy") {
    record.treatment = region_->policy(name);
  }
}

// Called for a storage that the operator has made.
void OpTape::treat_result(const TapeOperator& record, int storage) {
  TapeStorage& s = at(storage);
  s.is_blank = record.makes_blank;
  if (record.treatment == Keep::Recompute) {
    return;
  }
  const bool is_small = s.bytes < OffloadOptions{}.min_bytes.count();
  s.is_offloaded = record.treatment == Keep::Offload && !is_small && s.is_counted;
  s.is_source = !s.is_offloaded;
  if (s.is_offloaded && store_ == nullptr) {
    static const std::shared_ptr<OffloadStore> store = make_offload_store(OffloadOptions{});
    store_ = store;
  }
}

// Called for a storage that the operator has written, after judge() has set is_rebuildable.
void OpTape::judge_in_region(const TapeOperator& record, int storage) {
  TapeStorage& s = at(storage);
  s.is_read = false;
  if (s.is_external()) {
    return;
  }
  s.is_drawn = record.is_drawn;
  s.is_source = s.is_source || (record.is_in_graph && !s.is_rebuildable && !s.is_offloaded);
  settle(storage);
}

// --- memory from outside

void OpTape::keep_outside(const at::Tensor& tensor, const std::shared_ptr<SavedTensorPolicy>& policy) {
  const std::lock_guard lock(mutex_);
  if (!has_bytes(tensor) || !is_all_of_its_storage(tensor)) {
    return;  // the tape holds the memory
  }
  const Replaced no_other_policy(region_->outside, std::shared_ptr<SavedTensorPolicy>());
  const int number = number_of(tensor);
  at(number).outside = std::make_shared<KeptOutside>(
      KeptOutside{policy, without_memory(tensor), policy->pack(tensor), /*is_asked_always=*/true});
  settle(number);
}

// The caller has just added the storage. A part of a leaf, as of a parameter or a data set, has its owner anyway.
void OpTape::pack_outside(int storage, const at::Tensor& tensor) {
  TapeStorage& s = at(storage);
  const std::shared_ptr<SavedTensorPolicy>& policy = region_->outside;
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
c10::Storage OpTape::from_outside(int storage) {
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
  note_place(storage, memory);
  begin_streams(storage, memory);
  return memory;
}

// --- writes

// `written` are about to be written.
void OpTape::save_from_write_in_region(const std::vector<at::Tensor>& written) {
  for (const at::Tensor& tensor : written) {
    if (has_bytes(tensor) && !tensor.is_inference()) {
      copy_before_write(tensor);
    }
  }
}

void OpTape::before_unseen_write(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (region_ && !is_closed_) {
    save_from_write_in_region({tensor});
  }
}

// Copies values that an operator has read and that cannot be made again. The copy takes over the storage's number.
// Memory from outside that is written is held by the tape: a policy outside has packed the values before the write.
void OpTape::copy_before_write(const at::Tensor& tensor) {
  const int number = number_of(tensor);
  if (at(number).is_lent() || (!at(number).is_external() && at(number).is_rebuildable)) {
    return;
  }
  if (!at(number).is_read) {
    hold_memory_itself(number);
    return;
  }
  c10::Storage copy;
  {
    const UnseenOperators unseen;
    const at::NoGradGuard no_grad;
    copy = storage_bytes(tensor).clone().storage();
  }
  TapeStorage& s = at(number);
  note_place(number, copy);
  begin_streams(number, copy);
  s.outside.reset();
  s.counts.clear();
  s.is_source = true;
  s.holding.hold(copy);
  const Replaced no_policy(region_->outside, std::shared_ptr<SavedTensorPolicy>());
  add_storage(tensor, -1);
}

void OpTape::hold_memory_itself(int storage) {
  at(storage).outside.reset();
  settle(storage);
}

// --- the end of the region, and backward

void OpTape::forget_what_is_unneeded() {
  std::vector<bool> is_saved(storages_.size()), is_operand(storages_.size());
  for (size_t s = 0; s < storages_.size(); ++s) {
    is_saved[s] = storages_[s].slots > 0;
  }
  for (auto op = operators_.rbegin(); op != operators_.rend(); ++op) {
    const bool runs_again = std::ranges::any_of(op->writes, [&](plan::Value value) {
      const auto s = static_cast<size_t>(value.storage);
      const bool is_kept = storages_[s].is_source || storages_[s].is_offloaded;
      return (is_saved[s] || is_operand[s]) && !storages_[s].is_external() &&
             (!is_kept || value.version < storages_[s].last_version());
    });
    if (runs_again) {
      for (const plan::Value& value : op->needs) {
        is_operand[static_cast<size_t>(value.storage)] = true;
      }
    }
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    TapeStorage& s = storages_[i];
    if (!is_operand[i]) {
      s.is_rebuildable = s.is_rebuildable && !s.is_source;  // kept as long as a saved tensor needs the storage
      s.is_source = false;
    }
    if (!is_operand[i] && !is_saved[i]) {
      s.is_offloaded = false;
      s.holding.put_away(nullptr);
      s.outside.reset();
      s.is_unneeded = true;
    }
    if (s.outside != nullptr && s.outside->is_asked_always) {
      s.holding.lose_sight();
    }
    settle(static_cast<int>(i));
  }
}

void OpTape::begin_asking() {
  if (std::exchange(asking_pass_, current_pass()) != current_pass()) {
    replayed_in_pass_ = 0;
    for (TapeStorage& storage : storages_) {
      storage.unasked = storage.slots;
    }
  }
}

void OpTape::note_asked(int storage) {
  TapeStorage& s = at(storage);
  if (s.unasked > 0 && --s.unasked == 0) {
    s.claimed = false;
    settle(storage);
  }
}

std::any OpTape::pack_result(const at::Tensor& tensor) {
  if (const std::optional<int> known = known_number_of(tensor)) {
    results_.push_back(*known);
  }
  return pack(tensor);
}

bool OpTape::is_missing(int storage) {
  const TapeStorage& s = at(storage);
  return s.unasked > 0 && !s.is_external() && s.is_rebuildable && !s.is_offloaded && !find(storage);
}

// The storages to make when backward asks for `storage`, which is the first.
std::vector<int> OpTape::targets_with(int storage) {
  std::vector<int> targets{storage};
  const auto add = [&](int s) {
    if (s != storage && is_missing(s)) {
      targets.push_back(s);
    }
  };
  if (region_ && is_closed_) {
    std::ranges::for_each(results_, add);
    const bool runs_often = replayed_in_pass_ >= std::ssize(operators_);
    for (int s = 0; runs_often && s < std::ssize(storages_); ++s) {
      add(s);
    }
  }
  return targets;
}

// Once all values that backward will ask for are in memory, no operator runs again in this pass.
void OpTape::let_go_of_operands() {
  for (int s = 0; s < std::ssize(storages_); ++s) {
    if (is_missing(s)) {
      return;
    }
  }
  for (int i = 0; i < std::ssize(storages_); ++i) {
    TapeStorage& s = at(i);
    const bool is_result = std::ranges::find(results_, i) != results_.end();
    if (s.outside != nullptr || is_result) {
      s.claimed = s.unasked > 0;
    } else if (!keeps_graph_ && !s.is_external()) {
      s.is_rebuildable = false;  // stays in memory, or away, until autograd lets go of the storage
    }
    s.is_source = s.is_source && keeps_graph_;
    settle(i);
  }
}

}  // namespace snug::detail
