#include "src/activations/late_copies.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "src/activations/operator_traits.h"
#include "src/core/has_bytes.h"

namespace snug::detail {

LateCopy::LateCopy(LateCopies& copies, const at::Tensor& tensor, const StoragePart& part)
    : copies_(copies), part_(part), storage_(tensor.storage().getWeakStorageImpl()), writes_{WriteCount(tensor)} {
  hold(tensor.storage());
}

LateCopy::~LateCopy() { copies_.forget(*this); }

void LateCopy::hold(const c10::Storage& memory) {
  memory_ = memory;
  if (!memory.device().is_cpu()) {
    stream_ = c10::impl::VirtualGuardImpl(memory.device_type()).getStream(memory.device());
  }
  state_ = State::Held;
}

bool LateCopy::is_held() const {
  const std::lock_guard lock(mutex);
  return state_ == State::Held;
}

void LateCopy::make() {
  const std::lock_guard lock(mutex);
  if (state_ != State::Held) {
    return;
  }
  const UnseenOperators unseen;
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard stream(stream_);
  if (copy(memory_)) {
    state_ = State::Copied;
    memory_ = c10::Storage();
  } else {
    state_ = State::Kept;
  }
  for (WriteCount& writes : writes_) {
    writes.accept();
  }
}

void LateCopy::keep() {
  const std::lock_guard lock(mutex);
  state_ = state_ == State::Held ? State::Kept : state_;
}

bool LateCopy::hold_again(const c10::Storage& memory) {
  if (state_ != State::Copied) {
    return false;
  }
  forget();
  hold(memory);
  return true;
}

bool LateCopy::is_written_to(const c10::Storage& memory) {
  const std::lock_guard lock(mutex);
  return hold_again(memory);
}

bool LateCopy::add(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex);
  const bool was_written =
      std::any_of(writes_.begin(), writes_.end(), [](const WriteCount& writes) { return writes.moved(); });
  WriteCount writes(tensor);
  if (std::none_of(writes_.begin(), writes_.end(),
                   [&](const WriteCount& one) { return one.counter() == writes.counter(); })) {
    writes_.push_back(std::move(writes));
  }
  return was_written && hold_again(tensor.storage());
}

// --- LateCopies

void LateCopies::call(const OperatorCall& call, Stack& stack) {
  const OperatorTraits& traits = traits_of(call.op);
  std::vector<c10::Storage> written;
  visit_written(traits, Arguments(call.op, stack), [&](const at::Tensor& tensor, size_t) {
    if (has_bytes(tensor)) {
      written.push_back(tensor.storage());
    }
  });
  if (!traits.is_view && !held_.empty()) {
    make_but(written);
  }
  for (const c10::Storage& memory : written) {
    hold_again(memory);
  }
  call.proceed(stack);
}

void LateCopies::make_but(const std::vector<c10::Storage>& written) {
  const auto is_written = [&](const LateCopy& copy) {
    return std::any_of(written.begin(), written.end(),
                       [&](const c10::Storage& memory) { return memory.unsafeGetStorageImpl() == copy.name(); });
  };
  for (const auto& held : held_) {
    if (const auto copy = held.lock(); copy != nullptr && !is_written(*copy)) {
      copy->make();
    }
  }
  std::erase_if(held_, [](const std::weak_ptr<LateCopy>& held) {
    const auto copy = held.lock();
    return copy == nullptr || !copy->is_held();
  });
}

void LateCopies::hold_again(const c10::Storage& memory) {
  for (const auto& copy : copies_of(memory.unsafeGetStorageImpl())) {
    if (copy->is_written_to(memory)) {
      held_.push_back(copy);
    }
  }
}

std::vector<std::shared_ptr<LateCopy>> LateCopies::copies_of(const c10::StorageImpl* name) const {
  std::vector<std::shared_ptr<LateCopy>> alive;
  const std::lock_guard lock(mutex_);
  const auto found = of_storage_.find(name);
  if (found != of_storage_.end()) {
    for (const auto& [part, one] : found->second) {
      if (auto copy = one.lock()) {
        alive.push_back(std::move(copy));
      }
    }
  }
  return alive;
}

std::shared_ptr<LateCopy> LateCopies::find(const at::Tensor& tensor, const StoragePart& part) {
  std::shared_ptr<LateCopy> copy;
  {
    const std::lock_guard lock(mutex_);
    if (const auto parts = of_storage_.find(tensor.storage().unsafeGetStorageImpl()); parts != of_storage_.end()) {
      const auto found = parts->second.find(part);
      copy = found == parts->second.end() ? nullptr : found->second.lock();
    }
  }
  if (copy != nullptr && copy->add(tensor)) {
    held_.push_back(copy);
  }
  return copy;
}

void LateCopies::add(const std::shared_ptr<LateCopy>& copy) {
  held_.push_back(copy);
  const std::lock_guard lock(mutex_);
  of_storage_[copy->name()][copy->part()] = copy;
}

// Another LateCopy may represent the part by now.
void LateCopies::forget(const LateCopy& dead) {
  const std::lock_guard lock(mutex_);
  const auto parts = of_storage_.find(dead.name());
  if (parts == of_storage_.end()) {
    return;
  }
  if (const auto found = parts->second.find(dead.part()); found != parts->second.end() && found->second.expired()) {
    parts->second.erase(found);
  }
  if (parts->second.empty()) {
    of_storage_.erase(parts);
  }
}

void LateCopies::make_all() noexcept {
  for (const auto& held : std::exchange(held_, {})) {
    if (const auto copy = held.lock()) {
      try {
        copy->make();
      } catch (...) {
        copy->keep();
      }
    }
  }
}

}  // namespace snug::detail
