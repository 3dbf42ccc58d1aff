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

LateCopy::LateCopy(LateCopies& copies, const at::Tensor& tensor)
    : copies_(copies),
      storage_(tensor.storage().getWeakStorageImpl()),
      bytes_(tensor.storage().nbytes()),
      writes_{WriteCount(tensor)} {
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
  if (const auto copy = copy_of(memory); copy != nullptr && copy->is_written_to(memory)) {
    held_.push_back(copy);
  }
}

std::shared_ptr<LateCopy> LateCopies::copy_of(const c10::Storage& memory) const {
  const std::lock_guard lock(mutex_);
  const auto found = of_storage_.find(memory.unsafeGetStorageImpl());
  return found == of_storage_.end() ? nullptr : found->second.lock();
}

std::shared_ptr<LateCopy> LateCopies::find(const at::Tensor& tensor) {
  std::shared_ptr<LateCopy> copy = copy_of(tensor.storage());
  if (copy == nullptr || copy->bytes_ != tensor.storage().nbytes()) {
    return nullptr;
  }
  if (copy->add(tensor)) {
    held_.push_back(copy);
  }
  return copy;
}

void LateCopies::add(const std::shared_ptr<LateCopy>& copy) {
  held_.push_back(copy);
  const std::lock_guard lock(mutex_);
  of_storage_[copy->name()] = copy;
}

// Another LateCopy may represent the storage by now.
void LateCopies::forget(const LateCopy& dead) {
  const std::lock_guard lock(mutex_);
  if (const auto found = of_storage_.find(dead.name()); found != of_storage_.end() && found->second.expired()) {
    of_storage_.erase(found);
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
