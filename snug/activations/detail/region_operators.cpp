#include "snug/activations/detail/region_operators.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/clone.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorOptions.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include "snug/activations/detail/kept_elsewhere.h"
#include "snug/activations/detail/storage_views.h"
#include "snug/core/error.h"

namespace snug::detail {
namespace {

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

// A result is new if no argument has its memory. Returns whether there is one, and none without a storage.
bool add_new_results(OwnMemory& own, const MemoryNames& given, const Stack& stack, size_t first_result) {
  bool found = false;
  bool all_have_storage = true;
  for (size_t i = first_result; i < stack.size(); ++i) {
    visit_tensors_in(stack[i], [&](const at::Tensor& result) {
      all_have_storage = all_have_storage && result.has_storage();
      if (!is_among(given, result)) {
        own.add(result);
        found = true;
      }
    });
  }
  return found && all_have_storage;
}

bool all_are_views(const MemoryNames& given, const Stack& stack, size_t first_result) {
  bool all = stack.size() > first_result;
  for (size_t i = first_result; i < stack.size(); ++i) {
    bool found = false;
    visit_tensors_in(stack[i], [&](const at::Tensor& result) {
      found = true;
      all = all && result.has_storage() && is_among(given, result);
    });
    all = all && found;
  }
  return all;
}

// Where a tensor's elements lie in its storage.
struct Geometry {
  explicit Geometry(const at::Tensor& t)
      : sizes(t.sizes().vec()), strides(t.strides().vec()), offset(t.storage_offset()) {}
  bool operator==(const Geometry&) const = default;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

// Casts come and go with autocast's cache, so that their calls cannot be counted.
bool may_be_kept(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  const auto& returns = op.schema().returns();
  return name != "aten::_to_copy" && std::none_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
           return result.type()->kind() == c10::TypeKind::ListType;
         });
}

template <class Calls>  // a ByCall, const or not
auto* find(Calls& calls, const c10::OperatorHandle& op, size_t call) {
  const auto of_op = calls.find(op);
  using Found = decltype(&of_op->second.find(call)->second);
  if (of_op == calls.end()) {
    return Found(nullptr);
  }
  const auto found = of_op->second.find(call);
  return found == of_op->second.end() ? Found(nullptr) : &found->second;
}

}  // namespace

bool KeptResult::is_intact() const {
  return std::all_of(values.begin(), values.end(), [](const Value& value) {
    return !value.version || value.version->current_version() == value.version_at_end;
  });
}

void KeptResult::pack() {
  for (Value& value : values) {
    if (value.as_it_is.isTensor() && value.version) {
      value.packed = packer->pack(value.as_it_is.toTensor());
      value.as_it_is = {};  // the version stays: what was packed may still be the memory that was to be packed
    }
  }
}

bool KeptResult::is_packed() const {
  return std::any_of(values.begin(), values.end(), [](const Value& value) { return value.packed.has_value(); });
}

// --- forward

void ForwardOperators::call(const OperatorCall& call, Stack& stack) {
  const OperatorTraits& traits = traits_of(call.op);
  const Arguments arguments(call.op, stack);
  const size_t first_result = stack.size() - arguments.size();
  const MemoryNames given = memory_in(arguments);
  const std::vector<size_t> written = traits.written_by(arguments);
  MemoryNames written_storages;
  for (const size_t i : written) {
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      keep_what_was_there(tensor);
      written_storages.push_back(memory_of(tensor));
    });
  }
  // Of a tensor that is written alone: transposing or resizing in place is not absorbed. Sparse and nested tensors have no strides.
  std::optional<Geometry> before;
  at::Tensor target;
  if (!kept_storages_.empty() && written.size() == 1 && arguments[written.front()].isTensor()) {
    target = arguments[written.front()].toTensor();
    if (target.has_storage() && !target.is_nested()) {
      before.emplace(target);
    }
  }
  call.proceed(stack);
  record_.sequence.push_back(call.op);
  const bool has_new = add_new_results(own_, given, stack, first_result);
  if (!policy_) {
    return;
  }
  const OperatorPlace place{call.op, calls_[call.op]++};
  const bool is_view = written.empty() && all_are_views(given, stack, first_result);
  if (to_be_packed_ && !is_view && !writes_to(*to_be_packed_, written_storages)) {
    result_at(*std::exchange(to_be_packed_, std::nullopt))->pack();
  }
  for (const MemoryName name : given) {  // a view does not read
    const auto found = kept_storages_.find(name);
    const bool is_written = std::find(written_storages.begin(), written_storages.end(), name) != written_storages.end();
    if (found != kept_storages_.end() && !is_written && !is_view) {
      result_at(found->second.place)->was_read = true;
    }
  }
  const bool can_be_absorbed = before && *before == Geometry(target) && !traits.is_random &&
                               call.op.schema().returns().size() == 1 && stack[first_result].isTensor();
  for (const MemoryName name : written_storages) {
    note_write(name, place, can_be_absorbed ? std::optional(written.front()) : std::nullopt);
  }
  if (written.empty() && has_new && may_be_kept(call.op) && !c10::InferenceMode::is_enabled()) {
    if (const Keep keep = policy_(call.op.schema().name()); keep != Keep::Recompute) {
      keep_result(traits, place, keep, stack, first_result);
    }
  }
}

KeptResult* ForwardOperators::result_at(const OperatorPlace& place) const {
  return find(record_.kept, place.op, place.call);
}

bool ForwardOperators::writes_to(const OperatorPlace& place, const MemoryNames& storages) const {
  return std::any_of(storages.begin(), storages.end(), [&](MemoryName name) {
    const auto found = kept_storages_.find(name);
    return found != kept_storages_.end() && found->second.place == place;
  });
}

void ForwardOperators::close() {
  if (to_be_packed_) {
    result_at(*std::exchange(to_be_packed_, std::nullopt))->pack();
  }
  for (auto& [op, calls] : record_.kept) {
    for (auto& [call, result] : calls) {
      for (KeptResult::Value& value : result.values) {
        if (value.version) {
          value.version_at_end = value.version->current_version();
        }
      }
    }
  }
}

bool ForwardOperators::wrote_to_outside_graph() const {
  return std::any_of(written_outside_.begin(), written_outside_.end(), [](const OutsideTensor& outside) {
    auto alive = outside.tensor.lock();
    return alive && at::Tensor(std::move(alive)).grad_fn() != outside.grad_fn;
  });
}

void ForwardOperators::keep_what_was_there(const at::Tensor& tensor) {
  if (own_.contains(tensor)) {
    return;
  }
  if (!tensor.has_storage()) {
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

void ForwardOperators::keep_result(const OperatorTraits& traits, OperatorPlace place, Keep keep, const Stack& stack,
                                   size_t first_result) {
  KeptResult result;
  result.packer = keep == Keep::Offload ? offload_packer() : keep == Keep::Compress ? compress_packer() : nullptr;
  std::vector<at::Tensor> tensors;
  for (size_t i = first_result; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().has_storage()) {
      result.values.push_back({value});
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    const at::Tensor alias = on_storage(tensor, tensor.storage());
    const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
    mark_as_saved(alias);
    result.values.push_back({.as_it_is = alias, .version = version, .version_at_end = version.current_version()});
    tensors.push_back(tensor);
  }
  if (traits.is_random && preserve_rng_state_) {
    result.generators_after = RngState::capture();
  }
  for (const at::Tensor& tensor : tensors) {
    kept_storages_.insert_or_assign(memory_of(tensor), KeptStorage{tensor.storage().getWeakStorageImpl(), place});
  }
  if (result.packer) {
    to_be_packed_ = place;
  }
  record_.kept[place.op].emplace(place.call, std::move(result));
}

// A kept result holds what was written to it last. That serves the recomputation as well, without the writing, unless something needs what
// it was before.
void ForwardOperators::note_write(MemoryName memory, OperatorPlace place, std::optional<size_t> argument) {
  const auto found = kept_storages_.find(memory);
  if (found == kept_storages_.end()) {
    return;
  }
  const OperatorPlace kept = found->second.place;
  KeptResult* result = result_at(kept);
  if (!result->was_read && !result->is_packed() && argument) {
    record_.absorbed[place.op].emplace(place.call, RegionOperators::Absorbed{result, *argument});
    result->absorbed.push_back(place);
    return;
  }
  for (const OperatorPlace& one : result->absorbed) {  // by any of its storages
    record_.absorbed[one.op].erase(one.call);
  }
  if (to_be_packed_ == kept) {
    to_be_packed_.reset();
  }
  std::erase_if(kept_storages_, [&](const auto& entry) { return entry.second.place == kept; });
  record_.kept[kept.op].erase(kept.call);
}

// --- recomputation

RecomputeOperators::~RecomputeOperators() {
  for (auto entry = versions_.rbegin(); entry != versions_.rend(); ++entry) {
    entry->first.set_version(entry->second);
  }
}

void RecomputeOperators::call(const OperatorCall& call, Stack& stack) {
  if (stopped_task_ && *stopped_task_ == torch::autograd::get_current_graph_task_id()) {
    throw RecomputedEnough{};
  }
  sequence_.push_back(call.op);
  if (!record_.kept.empty() && take_kept(call.op, calls_[call.op]++, stack)) {
    return;
  }
  const Arguments arguments(call.op, stack);
  const size_t first_result = stack.size() - arguments.size();
  redirect(arguments, traits_of(call.op).written_by(arguments));
  const MemoryNames given = memory_in(arguments);
  call.proceed(stack);
  add_new_results(own_, given, stack, first_result);
}

bool RecomputeOperators::take_kept(const c10::OperatorHandle& op, size_t call, Stack& stack) {
  const size_t arguments = op.schema().arguments().size();
  if (const auto* absorbed = find(record_.absorbed, op, call); absorbed != nullptr && absorbed->into->is_intact()) {
    c10::IValue result = Arguments(op, stack)[absorbed->argument];
    torch::jit::drop(stack, arguments);
    stack.push_back(std::move(result));
    return true;
  }
  const KeptResult* kept = find(record_.kept, op, call);
  if (kept == nullptr || !kept->is_intact()) {
    return false;
  }
  torch::jit::drop(stack, arguments);
  for (const KeptResult::Value& value : kept->values) {
    if (value.packed.has_value()) {
      std::any packed = value.packed;
      const at::Tensor tensor = kept->packer->unpack(packed);
      stack.emplace_back(on_storage(tensor, tensor.storage()));
    } else if (value.version) {
      stack.emplace_back(on_storage(value.as_it_is.toTensor(), value.as_it_is.toTensor().storage()));
    } else {
      stack.push_back(value.as_it_is);
    }
    visit_tensors_in(stack.back(), [&](const at::Tensor& tensor) { own_.add(tensor); });
  }
  if (kept->generators_after) {
    kept->generators_after->restore();
  }
  return true;
}

// Memory from outside of the region stands for a copy of it if the forward wrote to it or this operator is going to.
void RecomputeOperators::redirect(const Arguments& arguments, const std::vector<size_t>& written) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& argument = arguments[i];
    const bool is_written = std::find(written.begin(), written.end(), i) != written.end();
    if (argument.isTensor()) {
      if (const c10::Storage* scratch = scratch_of(argument.toTensor(), is_written)) {
        argument = on_storage(argument.toTensor(), *scratch);
      }
    } else if (argument.isList()) {
      c10::List<c10::IValue> list = argument.toList();
      bool is_copied = false;
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue element = list.get(k);
        const c10::Storage* scratch = element.isTensor() ? scratch_of(element.toTensor(), is_written) : nullptr;
        if (scratch != nullptr) {
          list = is_copied ? list : list.copy();
          is_copied = true;
          list.set(k, on_storage(element.toTensor(), *scratch));
        }
      }
      argument = is_copied ? c10::IValue(list) : argument;
    }
  }
}

const c10::Storage* RecomputeOperators::scratch_of(const at::Tensor& tensor, bool is_written) {
  if (!tensor.defined() || own_.contains(tensor)) {
    return nullptr;
  }
  if (!tensor.has_storage()) {
    if (is_written) {
      throw Error(
          "checkpoint: the recomputation is about to write once more to a tensor from outside of the region that "
          "cannot be "
          "copied (a sparse one); write out of place, or outside of the region");
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
  const at::Tensor copy = at::clone(before == record_.overwritten.end() ? storage_bytes(tensor) : before->second.bytes);
  own_.add(copy);
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
