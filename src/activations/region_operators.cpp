// How a recomputation makes the same values and changes nothing else
//
// Problem: the callable of a region runs twice. The second run must make the values of the first run, and must not
// repeat the first run's effects on memory and generators from outside of the region.
//
// Options: ask users for callables without effects (BatchNorm and dropout have effects), save all memory that the
// callable could reach (the whole model), or watch the operators.
//
// Choice: watch the operators below autograd. ForwardOperators records, RecomputeOperators uses the record:
//
//   memory from outside         forward                                   recomputation
//   written by an operator      the whole storage is copied before        operators work on copies
//   only read                   the number of writes is noted             another write since is an error
//
//   of the region
//   result kept by a policy     kept, or offloaded                        taken; the operator does not run
//   random numbers              the generator is copied (region_draws)    drawn from the copy
//   every value                 its origin is noted (region_values)       origins and operators are compared
//
// Consequences:
// - A kept result must be found by a name that is equal in both runs: the operator and the origins of its operands
//   (CallKeys), not the number of the call.
// - A kept result has its last written value, so an in-place write is absorbed and not repeated, unless an operator
//   needed the value before the write.
// - Effects without operators happen twice, such as writes of custom functions through pointers.

#include "src/activations/region_operators.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/clone.h>
#include <ATen/ops/narrow.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorOptions.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>

#include "snug/core.h"
#include "src/activations/kept_elsewhere.h"
#include "src/activations/storage_views.h"
#include "src/core/has_bytes.h"
#include "src/memory/backward_pass.h"

namespace snug::detail {
namespace {

using MemoryNames = c10::SmallVector<MemoryName, 8>;

MemoryNames memory_in(const Arguments& arguments) {
  MemoryNames names;
  for (const c10::IValue& argument : arguments) {
    visit_tensors_in(argument, [&](const at::Tensor& tensor) { names.push_back(memory_of(tensor)); });
  }
  return names;
}

bool is_among(const MemoryNames& names, const at::Tensor& tensor) {
  return std::find(names.begin(), names.end(), memory_of(tensor)) != names.end();
}

bool all_are_views(const MemoryNames& given, const Stack& stack, size_t first_result) {
  bool all = stack.size() > first_result;
  for (size_t i = first_result; i < stack.size(); ++i) {
    bool found = false;
    visit_tensors_in(stack[i], [&](const at::Tensor& result) {
      found = true;
      all = all && has_bytes(result) && is_among(given, result);
    });
    all = all && found;
  }
  return all;
}

// The layout of a tensor's elements in its storage.
struct Geometry {
  explicit Geometry(const at::Tensor& t)
      : sizes(t.sizes().vec()), strides(t.strides().vec()), offset(t.storage_offset()) {}
  bool operator==(const Geometry&) const = default;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

// Casts come and go with autocast's cache.
bool may_be_kept(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  const auto& returns = op.schema().returns();
  return name != "aten::_to_copy" && std::none_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
           return result.type()->kind() == c10::TypeKind::ListType;
         });
}

}  // namespace

// --- forward

ForwardOperators::ForwardOperators(RegionOperators& record, const std::vector<at::Tensor>& inputs,
                                   CheckpointPolicy policy, bool preserve_rng_state, bool draws_unseen)
    : record_(record), policy_(std::move(policy)), values_(record.known) {
  if (preserve_rng_state) {
    draws_.emplace(record_.draws.emplace(draws_unseen));
  }
  values_.add_inputs(inputs);
}

void ForwardOperators::call(const OperatorCall& call, Stack& stack) {
  const OperatorTraits& traits = traits_of(call.op);
  const Arguments arguments(call.op, stack);
  const size_t first_result = stack.size() - arguments.size();
  const std::vector<size_t> written = traits.written_by(arguments);
  const RegionValues::Call entered = values_.enter(call.op, traits, arguments, written);
  note_reads(traits, arguments, written);
  WrittenMemory written_memory;
  for (const size_t i : written) {
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      keep_what_was_there(tensor);
      written_memory.push_back({memory_of(tensor), WriteCount::counter_of(tensor)});
    });
  }
  const FilledSaves filled = just_saved_.take(arguments, written);
  const CallKey key = policy_ ? keys_.next(entered.origin, arguments) : 0;
  const MemoryNames given = policy_ ? memory_in(arguments) : MemoryNames();
  // The layout of the written tensor, if the operator writes a single tensor: transposing or resizing in place is not
  // absorbed. Nested tensors and tensors without bytes have no strides.
  std::optional<Geometry> before;
  at::Tensor target;
  if (!kept_memory_.empty() && written.size() == 1 && arguments[written.front()].isTensor()) {
    target = arguments[written.front()].toTensor();
    if (has_bytes(target) && !target.is_nested()) {
      before.emplace(target);
    }
  }
  note_aliases(stack, first_result);
  draws_ ? draws_->call(call, stack) : call.proceed(stack);
  filled.tell();
  record_.sequence.push_back(call.op);
  const bool has_new = values_.leave(entered, stack, first_result);
  if (!policy_) {
    return;
  }
  note_aliases(stack, first_result);
  const bool is_view = written.empty() && all_are_views(given, stack, first_result);
  if (to_be_packed_ && !is_view && !writes_to(*to_be_packed_, written_memory)) {
    pack_last();
  }
  for (const MemoryName name : given) {  // a view does not read
    const auto found = kept_memory_.find(name);
    const bool is_written = std::any_of(written_memory.begin(), written_memory.end(),
                                        [&](const Written& one) { return one.memory == name; });
    if (found != kept_memory_.end() && !is_written && !is_view) {
      record_.kept.find(found->second)->was_read = true;
    }
  }
  const bool can_be_absorbed = before && *before == Geometry(target) && !traits.is_random &&
                               call.op.schema().returns().size() == 1 && stack[first_result].isTensor();
  for (const Written& one : written_memory) {
    note_write(one, key, can_be_absorbed ? std::optional(written.front()) : std::nullopt);
  }
  if (written.empty() && has_new && may_be_kept(call.op) && !c10::InferenceMode::is_enabled()) {
    if (const Keep keep = policy_(call.op.schema().name()); keep != Keep::Recompute) {
      keep_result(key, keep, stack, first_result);
    }
  }
}

bool ForwardOperators::must_compare_values() {
  if (!draws_ || record_.draws->repeats_unseen) {
    return false;
  }
  if (!record_.draws->has_moved) {
    draws_->note_if_moved();
  }
  return record_.draws->has_moved;
}

// Notes the arguments or results of an operator that share the memory of a kept result.
void ForwardOperators::note_aliases(const Stack& stack, size_t first) {
  for (size_t i = first; !kept_memory_.empty() && i < stack.size(); ++i) {
    visit_tensors_in(stack[i], [&](const at::Tensor& tensor) {
      const auto found = kept_memory_.find(memory_of(tensor));
      if (found != kept_memory_.end()) {
        record_.kept.find(found->second)->note_alias(tensor);
      }
    });
  }
}

void ForwardOperators::pack_last() { record_.kept.find(*std::exchange(to_be_packed_, std::nullopt))->pack(); }

bool ForwardOperators::writes_to(CallKey kept, const WrittenMemory& written) const {
  return std::any_of(written.begin(), written.end(), [&](const Written& one) {
    const auto found = kept_memory_.find(one.memory);
    return found != kept_memory_.end() && found->second == kept;
  });
}

// Writes that happened without an operator will happen again in the recomputation, and cannot be told apart.
void ForwardOperators::close() {
  if (draws_) {
    draws_->note_if_moved();
  }
  just_saved_ = {};
  if (to_be_packed_) {
    pack_last();
  }
  record_.kept.close();
  std::erase_if(record_.read, [](const auto& entry) { return entry.second.moved(); });
  values_.close();
}

bool ForwardOperators::wrote_to_outside_graph() const {
  return std::any_of(written_outside_.begin(), written_outside_.end(), [](const OutsideTensor& outside) {
    auto alive = outside.tensor.lock();
    return alive && at::Tensor(std::move(alive)).grad_fn() != outside.grad_fn;
  });
}

void ForwardOperators::note_reads(const OperatorTraits& traits, const Arguments& arguments,
                                  const std::vector<size_t>& written) {
  values_.visit_reads_from_outside(traits, arguments, written, [&](const at::Tensor& tensor) {
    const WriteCount count(tensor);
    if (count.counter() != nullptr) {
      record_.read.try_emplace(count.counter(), count);
    }
  });
}

void ForwardOperators::keep_what_was_there(const at::Tensor& tensor) {
  if (values_.is_own(tensor)) {
    return;
  }
  if (!has_bytes(tensor) || values_.is_part_of_sparse(tensor)) {
    wrote_to_outside_sparse_ = true;
    return;
  }
  if (!tensor.is_view()) {
    written_outside_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), tensor.grad_fn()});
  }
  if (record_.overwritten.contains(memory_of(tensor))) {
    return;
  }
  record_.overwritten.emplace(memory_of(tensor), RegionOperators::Before{tensor.storage().getWeakStorageImpl(),
                                                                         at::clone(storage_bytes(tensor))});
}

void ForwardOperators::keep_result(CallKey key, Keep keep, const Stack& stack, size_t first_result) {
  KeptResult result;
  result.packer = keep == Keep::Offload ? offload_packer() : nullptr;
  for (size_t i = first_result; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (!value.isTensor() || !has_bytes(value.toTensor())) {
      result.values.push_back({value});
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    const at::Tensor alias = on_storage(tensor, tensor.storage());
    mark_as_saved(alias);
    result.values.push_back({.as_it_is = alias, .writes = WriteCount(tensor)});
    kept_memory_.insert_or_assign(memory_of(tensor), key);
  }
  if (result.packer) {
    to_be_packed_ = key;
  }
  record_.kept.results.emplace(key, std::move(result));
}

// A kept result has its last written value. The last value is right for the recomputation, which need not write again,
// unless an operator needs the value before the write.
void ForwardOperators::note_write(const Written& written, CallKey key, std::optional<size_t> argument) {
  const auto found = kept_memory_.find(written.memory);
  if (found == kept_memory_.end()) {
    return;
  }
  const CallKey kept = found->second;
  KeptResult* result = record_.kept.find(kept);
  if (!result->was_read && !result->is_packed() && argument) {
    result->expect_write(written.counter);
    record_.kept.absorbed.emplace(key, KeptResults::Absorbed{result, *argument});
    result->absorbed.push_back(key);
    return;
  }
  if (to_be_packed_ == kept) {
    to_be_packed_.reset();
  }
  std::erase_if(kept_memory_, [&](const auto& entry) { return entry.second == kept; });
  record_.kept.drop(kept);
}

// --- recomputation

RecomputeOperators::RecomputeOperators(const RegionOperators& record, const std::vector<at::Tensor>& inputs,
                                       std::string region)
    : record_(record), region_(std::move(region)), values_(record.known) {
  if (record_.draws) {
    draws_.emplace(*record_.draws);
  }
  values_.add_inputs(inputs);
}

RecomputeOperators::~RecomputeOperators() {
  for (auto entry = versions_.rbegin(); entry != versions_.rend(); ++entry) {
    entry->first.set_version(entry->second);
  }
}

void RecomputeOperators::call(const OperatorCall& call, Stack& stack) {
  const OperatorTraits& traits = traits_of(call.op);
  const Arguments arguments(call.op, stack);
  const size_t first_result = stack.size() - arguments.size();
  const std::vector<size_t> written = traits.written_by(arguments);
  if (is_end(arguments, written)) {
    stop();
  }
  if (!stopped_task_) {
    just_saved_.clear();
  }
  sequence_.push_back(call.op);
  const FilledSaves filled = unfilled_.take(arguments, written);
  const bool draws = draws_ && !call.random.from.defined() && traits.draws(arguments);
  const RegionDraws::Draw* const draw = draws ? draws_->next(call.op, arguments) : nullptr;
  const RegionValues::Call entered = values_.enter(call.op, traits, arguments, written);
  if (record_.kept.results.empty() || !take_kept(call.op, keys_.next(entered.origin, arguments), stack)) {
    check_reads(call.op, traits, arguments, written);
    const Redirected redirected = redirect(arguments, written);
    draws ? draws_->run(call, stack, draw) : call.proceed(stack);
    check_shapes(call.op, redirected);
  } else if (draws) {
    draws_->pass_over(draw);
  }
  filled.tell();
  values_.leave(entered, stack, first_result);
}

void RecomputeOperators::stop() {
  has_stopped_ = true;
  throw RecomputedEnough();
}

bool RecomputeOperators::is_end(const Arguments& arguments, const std::vector<size_t>& written) const {
  if (!stopped_task_ || has_stopped_ || *stopped_task_ != current_pass() ||
      std::uncaught_exceptions() > exceptions_around_) {
    return false;
  }
  bool takes = false;
  bool fills = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      const bool was_saved = std::find(just_saved_.begin(), just_saved_.end(), memory_of(tensor)) != just_saved_.end();
      takes = takes || was_saved;
      fills = fills || (was_saved && std::find(written.begin(), written.end(), i) != written.end());
    });
  }
  return takes && !fills;
}

bool RecomputeOperators::take_kept(const c10::OperatorHandle& op, CallKey key, Stack& stack) {
  const size_t arguments = op.schema().arguments().size();
  const auto absorbed = record_.kept.absorbed.find(key);
  if (absorbed != record_.kept.absorbed.end() && absorbed->second.into->is_intact()) {
    c10::IValue result = Arguments(op, stack)[absorbed->second.argument];
    torch::jit::drop(stack, arguments);
    stack.push_back(std::move(result));
    return true;
  }
  const auto found = record_.kept.results.find(key);
  if (found == record_.kept.results.end() || !found->second.is_intact()) {
    return false;
  }
  const KeptResult& kept = found->second;
  torch::jit::drop(stack, arguments);
  for (const KeptResult::Value& value : kept.values) {
    if (value.packed.has_value()) {
      std::any packed = value.packed;
      const at::Tensor tensor = kept.packer->unpack(packed);
      stack.emplace_back(on_storage(tensor, tensor.storage()));
    } else if (value.writes) {
      stack.emplace_back(on_storage(value.as_it_is.toTensor(), value.as_it_is.toTensor().storage()));
    } else {
      stack.push_back(value.as_it_is);
    }
  }
  return true;
}

// Makes the same check as autograd makes for a saved tensor.
void RecomputeOperators::check_reads(const c10::OperatorHandle& op, const OperatorTraits& traits,
                                     const Arguments& arguments, const std::vector<size_t>& written) const {
  values_.visit_reads_from_outside(traits, arguments, written, [&](const at::Tensor& tensor) {
    const auto then = record_.read.find(WriteCount::counter_of(tensor));
    TORCH_CHECK(then == record_.read.end() || !then->second.moved() || record_.overwritten.contains(memory_of(tensor)),
                region_, ": operator ", sequence_.size(), " (", op.schema().name(),
                ") reads a tensor from outside of the region, [", fmt::format("{}", fmt::join(tensor.sizes(), ", ")),
                "], that has been modified by an inplace operation since the forward, so that its recomputation would "
                "find other values. Write to it after backward, or give the region a clone.");
  });
}

// Memory from outside of the region is replaced by a copy if the forward wrote to the memory or this operator is about
// to write to it. Returns the written tensors and their replacements.
RecomputeOperators::Redirected RecomputeOperators::redirect(const Arguments& arguments,
                                                            const std::vector<size_t>& written) {
  Redirected redirected;
  const auto on_scratch = [&](const at::Tensor& tensor, bool is_written) {
    const c10::Storage* const scratch = scratch_of(tensor, is_written);
    at::Tensor copy = scratch != nullptr ? on_storage(tensor, *scratch) : at::Tensor();
    if (is_written && scratch != nullptr) {
      redirected.emplace_back(tensor, copy);
    }
    return copy;
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& argument = arguments[i];
    const bool is_written = std::find(written.begin(), written.end(), i) != written.end();
    if (argument.isTensor()) {
      if (at::Tensor copy = on_scratch(argument.toTensor(), is_written); copy.defined()) {
        argument = std::move(copy);
      }
    } else if (argument.isList()) {
      c10::List<c10::IValue> list = argument.toList();
      bool is_copied = false;
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue element = list.get(k);
        at::Tensor copy = element.isTensor() ? on_scratch(element.toTensor(), is_written) : at::Tensor();
        if (copy.defined()) {
          list = is_copied ? list : list.copy();
          is_copied = true;
          list.set(k, std::move(copy));
        }
      }
      argument = is_copied ? c10::IValue(list) : argument;
    }
  }
  return redirected;
}

// The original tensor is not resized, so it must already have the shape that the operator gives it.
void RecomputeOperators::check_shapes(const c10::OperatorHandle& op, const Redirected& redirected) const {
  for (const auto& [tensor, copy] : redirected) {
    if (!tensor.is_nested() && Geometry(tensor) != Geometry(copy)) {
      throw Error(
          fmt::format("{}: operator {} ({}) makes a tensor from outside of the region [{}] in the recomputation, which "
                      "has become [{}] since the forward; do not resize or transpose it in place more than once before "
                      "backward, or make it inside",
                      region_, sequence_.size(), op.schema().name(), fmt::join(copy.sizes(), ", "),
                      fmt::join(tensor.sizes(), ", ")));
    }
  }
}

const c10::Storage* RecomputeOperators::scratch_of(const at::Tensor& tensor, bool is_written) {
  if (!tensor.defined() || values_.is_own(tensor)) {
    return nullptr;
  }
  if (!has_bytes(tensor)) {
    if (is_written) {
      throw Error(
          fmt::format("{}: the recomputation is about to write once more to a tensor from outside of the region that "
                      "cannot be copied (a sparse one, or a wrapper); write out of place, or outside of the region",
                      region_));
    }
    return nullptr;
  }
  if (is_written && !tensor.is_inference()) {
    const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
    versions_.emplace_back(version, version.current_version());
  }
  const MemoryName name = memory_of(tensor);
  if (const auto known = scratch_.find(name); known != scratch_.end()) {
    return &known->second;
  }
  const auto before = record_.overwritten.find(name);
  if (before == record_.overwritten.end() && !is_written) {
    return nullptr;
  }
  // The storage may have grown since the forward, and the tensor with the storage.
  const bool has_before = before != record_.overwritten.end();
  const int64_t bytes_before = has_before ? before->second.bytes.numel() : 0;
  const bool has_grown = static_cast<int64_t>(tensor.storage().nbytes()) > bytes_before;
  const at::Tensor copy = at::clone(has_grown ? storage_bytes(tensor) : before->second.bytes);
  if (has_before && has_grown) {
    copy.narrow(0, 0, bytes_before).copy_(before->second.bytes);
  }
  values_.use_for(copy, tensor);
  return &scratch_.emplace(name, copy.storage()).first->second;
}

std::string RecomputeOperators::place() const {
  if (sequence_.empty()) {
    return "before the first operator";
  }
  std::string text = fmt::format("after operator {} ({})", sequence_.size(), sequence_.back().schema().name());
  const auto& then = record_.sequence;
  const auto [was, is] = std::mismatch(then.begin(), then.end(), sequence_.begin(), sequence_.end());
  if (is != sequence_.end()) {
    text +=
        fmt::format("; the operators differ from number {} on: {} in forward, {} in the recomputation",
                    is - sequence_.begin() + 1, was == then.end() ? "none" : was->schema().name(), is->schema().name());
  }
  return text;
}

}  // namespace snug::detail
