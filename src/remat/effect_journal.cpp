#include "src/remat/effect_journal.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/DeviceGuard.h>

#include "snug/state.h"
#include "src/activations/operator_traits.h"
#include "src/activations/storage_views.h"
#include "src/core/allocated_bytes.h"
#include "src/core/has_bytes.h"
#include "src/core/other_state.h"
#include "src/memory/aside.h"

// The essay is on top of effect_journal.h. The sections below: beginning and end, writes, gradients, the way back, and
// queries about the latest run.

namespace snug::detail {
namespace {

bool is_strided(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

// Whether all bytes are zero. To ask a device means to wait for the device, so small tensors of devices count as
// nonzero.
bool is_all_zero(const at::Tensor& tensor) {
  constexpr size_t kWorthWaiting = 1 << 20;
  if (!is_strided(tensor) || !tensor.is_non_overlapping_and_dense() || tensor.is_conj() || tensor.is_neg()) {
    return false;
  }
  if (!tensor.is_cpu()) {
    return tensor.nbytes() >= kWorthWaiting &&
           !tensor.as_strided({tensor.numel()}, {1}).view(at::kByte).any().item<bool>();
  }
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  return std::all_of(first, first + tensor.nbytes(), [](char c) { return c == 0; });
}

// Visits each strided tensor that holds a part of the values. Other layouts, such as oneDNN's, have no parts to copy.
template <class F>
void visit_parts(const at::Tensor& tensor, const F& f) {
  if (tensor.layout() == at::kSparse) {
    f(tensor._indices());
    f(tensor._values());
  } else if (const auto layout = tensor.layout(); layout == at::kSparseCsr || layout == at::kSparseBsr ||
                                                  layout == at::kSparseCsc || layout == at::kSparseBsc) {
    const bool by_rows = layout == at::kSparseCsr || layout == at::kSparseBsr;
    f(by_rows ? tensor.crow_indices() : tensor.ccol_indices());
    f(by_rows ? tensor.col_indices() : tensor.row_indices());
    f(tensor.values());
  } else if (has_bytes(tensor)) {
    f(tensor);
  }
}

bool looks_the_same(const c10::TensorImpl& a, const c10::TensorImpl& b) {
  return a.unsafe_storage().unsafeGetStorageImpl() == b.unsafe_storage().unsafeGetStorageImpl() &&
         a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

}  // namespace

// --- beginning and end

void EffectJournal::begin(const std::vector<at::Tensor>& registered, const std::vector<at::Tensor*>& carried) {
  end();
  if (const auto& capture = other_state().capture) {
    other_state_ = capture();
  }
  generators_ = RngState::capture();
  for (at::Tensor* place : carried) {
    carried_.emplace_back(place, *place);
  }
  const UnseenOperators unseen;
  for (const at::Tensor& buffer : registered) {
    registered_.insert(buffer.unsafeGetTensorImpl());
    note_view(buffer);
    visit_parts(buffer,
                [&](const at::Tensor& part) { registered_memory_.insert(part.storage().unsafeGetStorageImpl()); });
  }
}

void EffectJournal::end() {
  generators_.reset();
  other_state_.reset();
  carried_.clear();
  memory_.clear();
  views_.clear();
  gradients_.clear();
  registered_.clear();
  registered_memory_.clear();
  made_.clear();
  bytes_ = 0;
}

EffectJournal::Run::Run(EffectJournal& journal, std::function<bool(const at::Tensor& leaf)> drops_gradient)
    : journal_(journal), operators_(std::in_place, static_cast<OperatorPolicy&>(journal)), passes_(journal) {
  journal_.drops_gradient_ = std::move(drops_gradient);
  journal_.is_forward_ = true;
  journal_.made_.clear();
  journal_.forget_what_is_gone();
  for (auto& [address, memory] : journal_.memory_) {
    memory.is_in_latest_run = false;
  }
}

void EffectJournal::Run::begin_forward() {
  journal_.is_forward_ = true;
  journal_.forget_what_is_gone();
  if (!operators_) {
    operators_.emplace(static_cast<OperatorPolicy&>(journal_));
  }
}

void EffectJournal::Run::begin_backward() {
  journal_.is_forward_ = false;
  if (journal_.registered_memory_.empty()) {
    operators_.reset();
  }
}

// Forgets tensors and memory that are gone. Otherwise the journal would keep entries for every micro-batch.
void EffectJournal::forget_what_is_gone() {
  const UnseenOperators unseen;
  forget_gradients([](const at::Tensor&) { return false; });
  std::erase_if(views_, [](const auto& entry) { return entry.second.tensor.expired(); });
  std::erase_if(memory_, [&](const auto& entry) {
    const Memory& memory = entry.second;
    const bool is_gone = memory.storage.expired();
    bytes_ -= is_gone && memory.values.defined() ? bytes_of(memory.values) : 0;
    return is_gone;
  });
}

int64_t EffectJournal::bytes_to_come() const {
  const UnseenOperators unseen;
  int64_t bytes = 0;
  for (const auto& [address, memory] : memory_) {
    const auto storage = memory.storage.lock();
    bytes += memory.values.defined() ? bytes_of(memory.values)
             : storage               ? allocated_bytes(static_cast<int64_t>(memory.bytes), storage->device())
                                     : 0;
  }
  for (const auto& [address, one] : gradients_) {
    const auto leaf = one.leaf.lock();
    bytes += one.values.defined() ? bytes_of(one.values) : leaf ? allocated_bytes(at::Tensor(leaf)) : 0;
  }
  return bytes;
}

// --- writes

void EffectJournal::call(const OperatorCall& call, Stack& stack) {
  const OperatorTraits& traits = traits_of(call.op);
  if (traits.is_view) {
    call.proceed(stack);
    return;
  }
  const size_t below = stack.size() - call.op.schema().arguments().size();
  if (!traits.written.empty() || !traits.statistics.empty() || traits.is_collective) {
    visit_written(traits, Arguments(call.op, stack), [&](const at::Tensor& tensor, size_t) { note_write(tensor); });
  }
  call.proceed(stack);
  if (is_forward_) {
    note_results(stack, below);
  }
}

// A result whose memory nobody else has is new.
void EffectJournal::note_results(const Stack& stack, size_t first) {
  for (size_t i = first; i < stack.size(); ++i) {
    visit_tensors_in(stack[i], [this](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage() && tensor.storage().use_count() == 1) {
        made_.insert(tensor.storage().unsafeGetStorageImpl());
      }
    });
  }
}

void EffectJournal::note_write(const at::Tensor& tensor) {
  if (!is_open() || !tensor.defined()) {
    return;
  }
  const UnseenOperators unseen;
  bool was_there = false;
  visit_parts(tensor, [&](const at::Tensor& part) {
    const c10::StorageImpl* memory = part.storage().unsafeGetStorageImpl();
    if (is_forward_ ? made_.count(memory) == 0 : registered_memory_.contains(memory)) {
      note_memory(part);
      was_there = true;
    }
  });
  if (was_there) {
    note_view(tensor);
  }
}

void EffectJournal::note_memory(const at::Tensor& tensor) {
  c10::StorageImpl* const memory = tensor.storage().unsafeGetStorageImpl();
  if (const auto noted = memory_.find(memory); noted != memory_.end()) {
    noted->second.is_in_latest_run = true;
    return;
  }
  const bool has_values = memory->nbytes() > 0;
  memory_.emplace(memory, Memory{.storage = tensor.storage().getWeakStorageImpl(),
                                 .bytes = memory->nbytes(),
                                 .values = has_values ? copy_of(storage_bytes(tensor)) : at::Tensor(),
                                 .is_in_latest_run = true});
}

void EffectJournal::note_view(const at::Tensor& tensor) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const bool is_python_s = impl->key_set().has(c10::DispatchKey::Python);  // a Python class, which may do anything
  if (!is_python_s && !views_.contains(impl)) {
    const bool holds_memory = is_registered(tensor) || !is_strided(tensor);
    views_.emplace(impl, View{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                              holds_memory ? at::Tensor(impl->shallow_copy_and_detach(c10::VariableVersion(0), true))
                                           : without_memory(tensor),
                              impl->unsafe_storage().unsafeGetStorageImpl(), holds_memory});
  }
}

// Returns an undefined tensor for zeros: zeros need no copy.
at::Tensor EffectJournal::copy_of(const at::Tensor& tensor) {
  const Aside none_of_the_step;
  const c10::NoGradGuard no_grad;
  if (is_strided(tensor) && (!can_be_read(tensor) || is_all_zero(tensor))) {
    return {};
  }
  at::Tensor copy = at::clone(tensor);
  bytes_ += bytes_of(copy);
  return copy;
}

int64_t EffectJournal::bytes_of(const at::Tensor& copy) {
  int64_t bytes = 0;
  visit_parts(copy, [&](const at::Tensor& part) { bytes += allocated_bytes(part); });
  return bytes;
}

// --- gradients

void EffectJournal::before_pass(const torch::autograd::edge_list& roots) {
  if (is_open()) {
    note_gradients(leaves_of(roots));
  }
}

void EffectJournal::note_gradients(const std::vector<at::Tensor>& leaves) {
  const UnseenOperators unseen;
  for (const at::Tensor& leaf : leaves) {
    const void* name = leaf.unsafeGetTensorImpl();
    if (gradients_.contains(name) || (drops_gradient_ && drops_gradient_(leaf))) {
      continue;
    }
    const at::Tensor& gradient = leaf.grad();
    gradients_.emplace(name, Gradient{c10::weak_intrusive_ptr<c10::TensorImpl>(leaf.getIntrusivePtr()), gradient,
                                      gradient.defined() ? copy_of(gradient) : at::Tensor()});
  }
}

void EffectJournal::forget_gradients(const std::function<bool(const at::Tensor& leaf)>& of) {
  const UnseenOperators unseen;
  std::erase_if(gradients_, [&](const auto& entry) {
    const Gradient& one = entry.second;
    const auto leaf = one.leaf.lock();
    const bool is_forgotten = !leaf || of(at::Tensor(leaf));
    bytes_ -= is_forgotten && one.values.defined() ? bytes_of(one.values) : 0;
    return is_forgotten;
  });
}

// --- the way back

void EffectJournal::take_back() {
  if (!is_open()) {
    return;
  }
  const UnseenOperators unseen;
  const Aside none_of_the_step;
  const c10::NoGradGuard no_grad;
  for (const auto& [address, memory] : memory_) {
    restore(memory);
  }
  for (const auto& [address, view] : views_) {
    restore(view);
  }
  for (const auto& [address, gradient] : gradients_) {
    restore(gradient);
  }
  generators_->restore();
  if (other_state_.has_value()) {
    other_state().restore(other_state_);
  }
  for (const auto& [place, before] : carried_) {
    *place = before;
  }
}

// If the memory is larger now, the memory stays, with fewer bytes. If the memory was given back, new memory is
// allocated.
void EffectJournal::restore(const Memory& memory) {
  const auto impl = memory.storage.lock();
  if (!impl) {
    return;
  }
  if (impl->nbytes() < memory.bytes) {
    const c10::OptionalDeviceGuard device(impl->device());
    impl->set_data_ptr(c10::GetAllocator(impl->device_type())->allocate(memory.bytes));
  }
  if (impl->nbytes() != memory.bytes) {
    impl->set_nbytes(memory.bytes);
  }
  if (impl->nbytes() == 0 || impl->data() == nullptr) {
    return;
  }
  at::Tensor bytes = storage_bytes(c10::Storage(impl));
  if (memory.values.defined()) {
    bytes.copy_(memory.values);
  } else {
    bytes.zero_();
  }
}

// A tensor on memory of another owner gets the old sizes back, if the tensor is still on the old memory.
void EffectJournal::restore(const View& view) {
  const auto tensor = view.tensor.lock();
  if (!tensor) {
    return;
  }
  c10::TensorImpl& now = *tensor;
  const c10::TensorImpl& before = *view.before.unsafeGetTensorImpl();
  if (!view.holds_memory) {
    const bool is_on_it = now.has_storage() && now.unsafe_storage().unsafeGetStorageImpl() == view.memory;
    if (is_on_it && now.dtype() == before.dtype() &&
        (now.sizes() != before.sizes() || now.strides() != before.strides())) {
      now.set_sizes_and_strides(before.sizes(), before.strides(), before.storage_offset());
    }
    return;
  }
  const bool is_other = !is_strided(view.before) || !before.has_storage() || !looks_the_same(now, before);
  if (is_other && now.has_compatible_shallow_copy_type(before.key_set())) {
    now.shallow_copy_from(view.before.getIntrusivePtr());
  }
}

void EffectJournal::restore(const Gradient& one) {
  const auto leaf = one.leaf.lock();
  if (!leaf) {
    return;
  }
  if (one.values.defined()) {
    at::Tensor(one.gradient).copy_(one.values);
  } else if (can_be_read(one.gradient)) {
    at::Tensor(one.gradient).zero_();
  }
  at::Tensor(leaf).mutable_grad() = one.gradient;
}

// --- writes of the latest run

bool EffectJournal::has_written(const c10::StorageImpl* memory) const {
  const auto noted = memory_.find(memory);
  return noted != memory_.end() && noted->second.is_in_latest_run;
}

bool EffectJournal::has_written(const at::Tensor& tensor) const {
  const UnseenOperators unseen;
  bool is_written = false;
  visit_parts(tensor, [&](const at::Tensor& part) {
    is_written = is_written || has_written(part.storage().unsafeGetStorageImpl());
  });
  return is_written;
}

std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> EffectJournal::written() const {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> result;
  for (const auto& [address, memory] : memory_) {
    if (memory.is_in_latest_run) {
      result.push_back(memory.storage);
    }
  }
  return result;
}

bool EffectJournal::is_registered(const at::Tensor& tensor) const {
  return registered_.contains(tensor.unsafeGetTensorImpl());
}

}  // namespace snug::detail
