#include "src/activations/host_home.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "src/activations/storage_views.h"
#include "src/core/host_memory.h"
#include "src/memory/absent_storage.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

namespace {

c10::Stream stream_now(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void let_wait(const c10::Stream& stream, const c10::Stream& earlier) {
  if (earlier != stream) {
    c10::Event event(stream.device_type());
    event.record(earlier);
    event.block(stream);
  }
}

void take_memory(const c10::Storage& storage, const at::Tensor& values) {
  detail::take_memory(
      storage, values.mutable_data_ptr(),
      "Stepper: this weight is in the host's memory, and comes to the device for each operator that the thread of the "
      "Stepper calls; use an operator on the thread of the Stepper, such as weight.cpu(), instead of a pointer or "
      "another thread");
}

// Operators of the home are no part of a step.
class HomeCopies {
  const at::NoGradGuard no_grad_;
  const UnseenOperators unseen_;
};

// In the window, in which all parts begin at multiples.
int64_t room_of(const c10::Storage& storage) {
  return SpillExtents::rounded_up(static_cast<int64_t>(storage.nbytes()));
}

}  // namespace

HostHome::HostHome(std::vector<c10::Storage> storages) : last_(stream_now(storages.front().device())) {
  const HomeCopies copies;
  for (c10::Storage& storage : storages) {
    const at::Tensor there = storage_bytes(storage);
    const at::Tensor values = in_host_memory("Stepper", "the model's weights", "or leave `offload` out", [&] {
      return at::empty(there.sizes(), at::TensorOptions(at::kByte).pinned_memory(true));
    });
    weights_.push_back({.storage = std::move(storage), .values = values});
    weights_.back().values.copy_(there, /*non_blocking=*/true);
  }
  c10::Event copied(last_.device_type());
  copied.record(last_);
  copied.synchronize();  // memory is released in the order of the stream that the memory was allocated for
}

void HostHome::open_window(int64_t bytes) {
  const HomeCopies copies;
  window_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(weights_.front().storage.device()));
  extents_ = SpillExtents(bytes);
}

int64_t HostHome::window_for(const std::vector<c10::Storage>& storages) {
  int64_t largest = 0, all = 0;
  for (const c10::Storage& storage : storages) {
    largest = std::max(largest, room_of(storage));
    all += room_of(storage);
  }
  return std::min(2 * largest, all);
}

void HostHome::take_out() {
  for (Weight& weight : weights_) {
    take_memory(weight.storage, weight.values);
  }
}

void HostHome::take_back() {
  const HomeCopies copies;
  const UnseenByWindows unseen;
  std::vector<c10::DataPtr> memory;
  for (const Weight& weight : weights_) {
    const c10::DeviceGuard guard(weight.storage.device());
    memory.push_back(c10::GetAllocator(weight.storage.device().type())->allocate(weight.storage.nbytes()));
  }
  for (size_t i = 0; i < weights_.size(); ++i) {
    meet(weights_[i]);
    give_memory(weights_[i].storage, std::move(memory[i]));
    storage_bytes(weights_[i].storage).copy_(weights_[i].values, /*non_blocking=*/true);
  }
}

int64_t HostHome::bytes_of(size_t number) const { return room_of(weights_[number].storage); }

bool HostHome::has_room(size_t number) const { return extents_.has_room(bytes_of(number)); }

void HostHome::bring(size_t number) {
  const HomeCopies copies;
  Weight& weight = weights_[number];
  const c10::Device device = weight.storage.device();
  const auto place = extents_.take(bytes_of(number));
  if (place) {
    char* const memory = static_cast<char*>(window_.mutable_data_ptr()) + *place;
    give_memory(weight.storage, borrowed_memory(memory, device));
  } else {
    const c10::DeviceGuard guard(device);
    give_memory(weight.storage, c10::GetAllocator(device.type())->allocate(weight.storage.nbytes()));
  }
  weight.place = place;
  weight.is_in = true;
  try {
    meet(weight);
    storage_bytes(weight.storage).copy_(weight.values, /*non_blocking=*/true);
  } catch (...) {
    let_go(number, /*is_written=*/false);
    throw;
  }
}

void HostHome::use(size_t number) { meet(weights_[number]); }

// The current stream may write over the memory from here on.
void HostHome::let_go(size_t number, bool is_written) {
  Weight& weight = weights_[number];
  if (!weight.is_in) {
    return;
  }
  const HomeCopies copies;
  meet(weight);
  for (const c10::Stream& user : weight.users) {
    let_wait(last_, user);
  }
  if (is_written) {
    weight.values.copy_(storage_bytes(weight.storage), /*non_blocking=*/true);
  }
  take_memory(weight.storage, weight.values);
  if (weight.place) {
    extents_.give_back(*weight.place, bytes_of(number));
  }
  weight.place.reset();
  weight.is_in = false;
  weight.users.clear();
}

// The current stream sees everything that streams before have done with the window. Streams that alternate wait for
// each other.
void HostHome::meet(Weight& weight) {
  const c10::Stream current = stream_now(weight.storage.device());
  if (current != last_) {
    let_wait(current, last_);
    if (window_.defined()) {
      c10::impl::VirtualGuardImpl(current.device_type()).recordDataPtrOnStream(window_.storage().data_ptr(), current);
    }
    last_ = current;
  }
  if (std::ranges::find(weight.users, current) == weight.users.end()) {
    weight.users.push_back(current);
  }
}

}  // namespace snug::detail
