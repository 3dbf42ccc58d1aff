#include "src/activations/region_values.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <string>

#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace snug::detail {
namespace {

uint64_t mix(uint64_t hash, uint64_t more) {
  hash = (hash ^ (hash >> 29)) * 0xbf58476d1ce4e5b9ULL + more;
  hash = (hash ^ (hash >> 32)) * 0x94d049bb133111ebULL;
  hash ^= hash >> 29;
  return hash == 0 ? 1 : hash;
}

constexpr Origin kFromOutside = 1;

Origin with_bit(uint64_t hash, Origin bit) {
  return (hash & ~kFromOutside) == 0 ? 2 | bit : (hash & ~kFromOutside) | bit;
}

bool is_of_numbers_alone(Origin origin) { return origin != 0 && (origin & kFromOutside) == 0; }

// Returns the origin with one more number. The bit of the values from outside stays.
Origin derived(Origin origin, uint64_t more) {
  return origin == 0 ? 0 : with_bit(mix(origin, more), origin & kFromOutside);
}

// The result is unknown if either origin is unknown.
Origin made_of(Origin origin, Origin more) {
  return origin == 0 || more == 0 ? 0 : with_bit(mix(origin, more), (origin | more) & kFromOutside);
}

constexpr uint64_t kInput = 1, kOutside = 2, kResult = 3, kWritten = 4;

Origin from_outside(uint64_t kind, uint64_t number) { return with_bit(mix(kind, number), kFromOutside); }

Origin of_operator(const c10::OperatorHandle& op) { return with_bit(mix(0, std::hash<c10::OperatorHandle>()(op)), 0); }

Origin of_result(Origin call, size_t index) { return derived(derived(call, kResult), index); }

Origin of_kind_and_sizes(Origin origin, const at::Tensor& tensor) {
  origin = derived(origin, static_cast<uint64_t>(tensor.scalar_type()));
  if (!tensor.is_nested()) {
    for (const int64_t size : tensor.sizes()) {
      origin = derived(origin, static_cast<uint64_t>(size));
    }
  }
  return origin;
}

int64_t offset_of(const at::Tensor& tensor) {
  return has_bytes(tensor) && !tensor.is_nested() ? tensor.storage_offset() : 0;
}

std::vector<int64_t> strides_of(const at::Tensor& tensor) {
  return has_bytes(tensor) && !tensor.is_nested() ? tensor.strides().vec() : std::vector<int64_t>();
}

// Autocast caches casts of parameters, so the recomputation may find a cast that the forward makes, or the other way
// round.
at::Tensor parameter_of_cast(const at::Tensor& tensor) {
  const at::Tensor owner = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  const auto cast = owner.grad_fn();
  if (cast == nullptr || cast->name() != "ToCopyBackward0") {
    return {};
  }
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(cast->next_edge(0).function.get());
  return leaf != nullptr ? leaf->variable : at::Tensor();
}

Origin of_cast() {
  static const Origin origin = of_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::_to_copy", ""));
  return origin;
}

uint64_t of_number(uint64_t hash, const c10::IValue& value) {
  if (value.isInt()) {
    return mix(hash, static_cast<uint64_t>(value.toInt()));
  }
  if (value.isDouble()) {
    return mix(hash, std::bit_cast<uint64_t>(value.toDouble()));
  }
  if (value.isBool()) {
    return mix(hash, value.toBool() ? 1 : 2);
  }
  if (value.isString()) {
    return mix(hash, std::hash<std::string>()(value.toStringRef()));
  }
  if (value.isList() && !value.isTensorList()) {
    for (const c10::IValue& element : value.toListRef()) {
      hash = of_number(hash, element);
    }
  }
  return mix(hash, value.isNone() ? 1 : 2);
}

}  // namespace

void RegionValues::add_inputs(const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    if (learnt_ != nullptr) {
      learnt_->inputs.push_back({});
    }
    if (!input.defined()) {
      continue;
    }
    const bool is_known = names_.count(memory_of(input)) > 0;
    if (learnt_ != nullptr) {
      if (!is_known) {
        add(input, /*is_own=*/false, from_outside(kInput, i), offset_of(input));
      }
      const Place& place = places_[place_of(input)];
      learnt_->memory.try_emplace(memory_of(input), KnownMemory::Memory{place.address, place.origin, place.first});
      learnt_->inputs.back() = {place.origin, offset_of(input) - place.first, strides_of(input)};
    } else if (!is_known) {  // hooks may have changed the layout, and other operators run for another layout
      const KnownMemory::Input& then = known_.inputs[i];
      add(input, /*is_own=*/false, then.strides == strides_of(input) ? then.origin : 0, offset_of(input) - then.offset);
    }
  }
}

void RegionValues::close() {
  for (const auto& [name, entry] : names_) {
    const Place& place = places_[entry.place];
    if (entry.is_own && place.address.is_alive()) {
      learnt_->memory.try_emplace(name, KnownMemory::Memory{place.address, place.origin, place.first});
    }
  }
}

bool RegionValues::is_own(const at::Tensor& tensor) const {
  const auto found = names_.find(memory_of(tensor));
  return found != names_.end() && found->second.is_own;
}

bool RegionValues::is_part_of_sparse(const at::Tensor& tensor) const {
  const auto found = names_.find(memory_of(tensor));
  return found != names_.end() && places_[found->second.place].is_part_of_sparse;
}

Origin RegionValues::origin_of(const at::Tensor& tensor) { return shown(places_[place_of(tensor)], tensor); }

void RegionValues::use_for(const at::Tensor& copy, const at::Tensor& original) {
  names_.insert_or_assign(memory_of(copy), Name{place_of(original), /*is_own=*/true});
}

uint32_t RegionValues::place_of(const at::Tensor& tensor) {
  const auto found = names_.find(memory_of(tensor));
  return found != names_.end() ? found->second.place : meet(tensor);
}

uint32_t RegionValues::add(const at::Tensor& tensor, bool is_own, Origin origin, int64_t first) {
  const auto place = static_cast<uint32_t>(places_.size());
  places_.push_back({MemoryAddress(tensor), origin, first});
  names_.insert_or_assign(memory_of(tensor), Name{place, is_own});
  return place;
}

// Memory from outside is identified by the number of the forward's first use among all first uses. Memory that only the
// recomputation meets has replaced other memory, such as a longer table or a gathered weight, or was never a result,
// such as a tensor of numbers.
uint32_t RegionValues::meet(const at::Tensor& tensor) {
  if (const at::Tensor parameter = parameter_of_cast(tensor); parameter.defined()) {
    return add(tensor, /*is_own=*/false, of_result(made_of(of_cast(), operand(parameter, /*is_written=*/false)), 0));
  }
  if (learnt_ != nullptr) {
    const Origin origin = from_outside(kOutside, known_.memory.size());
    learnt_->memory.try_emplace(memory_of(tensor), KnownMemory::Memory{MemoryAddress(tensor), origin, 0});
    return add(tensor, /*is_own=*/false, origin);
  }
  const auto known = known_.memory.find(memory_of(tensor));
  return known == known_.memory.end() ? add(tensor, /*is_own=*/false, 0)
                                      : add(tensor, /*is_own=*/false, known->second.origin, known->second.first);
}

Origin RegionValues::shown(const Place& place, const at::Tensor& tensor) const {
  return derived(place.origin, static_cast<uint64_t>(offset_of(tensor) - place.first));
}

// The sizes of a written tensor do not count: if the forward resized the tensor, the tensor has its new sizes in the
// recomputation.
Origin RegionValues::operand(const at::Tensor& tensor, bool is_written) {
  Origin origin = origin_of(tensor);
  if (origin == 0 || is_written) {
    return origin;
  }
  return of_kind_and_sizes(origin, tensor);
}

RegionValues::Call RegionValues::enter(const c10::OperatorHandle& op, const OperatorTraits& traits,
                                       const Arguments& arguments, const std::vector<size_t>& written) {
  Call call{.origin = of_operator(op), .written = {}, .shows_sparse = false};
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_written = std::find(written.begin(), written.end(), i) != written.end();
    const bool is_out = is_written && op.schema().arguments()[i].is_out();
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        return;
      }
      if (is_written) {
        call.written.push_back(place_of(tensor));
      }
      if (!is_out) {
        call.origin = made_of(call.origin, operand(tensor, is_written));
      }
      call.shows_sparse = call.shows_sparse || (traits.is_view && !has_bytes(tensor) && !is_own(tensor));
    });
  }
  if (is_of_numbers_alone(call.origin)) {
    // A table that the forward found, and the recomputation makes, has no origin to compare.
    if (learnt_ != nullptr) {
      learnt_->of_numbers_alone.insert(call.origin);
    } else if (!known_.of_numbers_alone.contains(call.origin)) {
      call.origin = 0;
    }
  }
  return call;
}

bool RegionValues::leave(const Call& call, const Stack& stack, size_t first_result) {
  bool has_new = false;
  bool all_have_bytes = true;
  size_t index = 0;
  for (size_t i = first_result; i < stack.size(); ++i) {
    visit_tensors_in(stack[i], [&](const at::Tensor& result) {
      const Origin origin = of_result(call.origin, index++);
      all_have_bytes = all_have_bytes && has_bytes(result);
      if (names_.count(memory_of(result)) == 0) {
        places_[add(result, /*is_own=*/!call.shows_sparse, origin)].is_part_of_sparse = call.shows_sparse;
        has_new = true;
      }
    });
  }
  for (size_t i = 0; i < call.written.size(); ++i) {
    Place& place = places_[call.written[i]];
    place.origin = made_of(place.origin, derived(derived(call.origin, kWritten), i));
  }
  return has_new && all_have_bytes;
}

Origin origin_by_sizes(const c10::OperatorHandle& op, const Arguments& arguments) {
  Origin origin = of_operator(op);
  for (size_t i = 0; i < arguments.size(); ++i) {
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      if (!op.schema().arguments()[i].is_out()) {
        origin = of_kind_and_sizes(origin, tensor);
      }
    });
  }
  return origin;
}

uint64_t CallKeys::next(Origin origin, const Arguments& arguments) {
  if (origin == 0) {
    return 0;
  }
  uint64_t key = origin;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor()) {
      key = of_number(key, argument);
    }
  }
  return mix(key, calls_[key]++);
}

}  // namespace snug::detail
