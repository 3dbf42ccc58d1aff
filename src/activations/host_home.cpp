#include "src/activations/host_home.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "src/activations/storage_views.h"
#include "src/core/has_bytes.h"
#include "src/core/host_memory.h"
#include "src/memory/absent_storage.h"
#include "src/memory/late_writes.h"
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
      storage, values,
      "Stepper: this weight is in the host's memory, and comes to the device for each operator that the thread of the "
      "Stepper calls; use an operator on the thread of the Stepper, such as weight.cpu(), instead of a pointer or "
      "another thread");
}

void let_use(const c10::DataPtr& memory, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(memory, stream);
}

// Operators of the home are no part of a step.
class HomeCopies {
 public:
  HomeCopies() = default;
  explicit HomeCopies(const c10::Stream& stream) : stream_(stream) {}

 private:
  const at::NoGradGuard no_grad_;
  const UnseenOperators unseen_;
  const c10::OptionalStreamGuard stream_;
};

// In the window, in which all parts begin at multiples.
int64_t room_of(const c10::Storage& storage) {
  return SpillExtents::rounded_up(static_cast<int64_t>(storage.nbytes()));
}

}  // namespace

HostHome::HostHome(std::vector<c10::Storage> storages)
    : copies_(c10::impl::VirtualGuardImpl(storages.front().device().type())
                  .getStreamFromGlobalPool(storages.front().device())) {
  const HomeCopies copies;
  const c10::Stream current = stream_now(storages.front().device());
  for (c10::Storage& storage : storages) {
    at::Tensor values = kept_values(storage);
    if (values.defined()) {
      weights_.push_back({.storage = std::move(storage), .values = values});
      continue;
    }
    const at::Tensor there = storage_bytes(storage);
    values = in_host_memory("Stepper", "the model's weights", "or leave `offload` out",
                            [&] { return at::empty(there.sizes(), at::TensorOptions(at::kByte).pinned_memory(true)); });
    weights_.push_back({.storage = std::move(storage), .values = values});
    weights_.back().values.copy_(there, /*non_blocking=*/true);
  }
  c10::Event copied(current.device_type());
  copied.record(current);
  copied.synchronize();  // memory is released in the order of the stream that the memory was allocated for
}

void HostHome::open_window(int64_t bytes) {
  const HomeCopies copies;
  close_window();
  window_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(weights_.front().storage.device()));
  extents_ = SpillExtents(bytes);
  let_wait(copies_, stream_now(window_.device()));  // earlier users of the memory
  let_use(window_.storage().data_ptr(), copies_);
}

void HostHome::close_window() {
  if (window_.defined()) {
    let_wait(stream_now(window_.device()), copies_);  // later users of the memory
  }
  window_ = at::Tensor();
  extents_ = SpillExtents(0);
}

void HostHome::take_out() {
  for (Weight& weight : weights_) {
    take_memory(weight.storage, weight.values);
  }
}

void HostHome::take_back() {
  for (const Weight& weight : weights_) {
    make_late_writes(storage_bytes(weight.storage));
  }
  const HomeCopies copies;
  const UnseenByWindows unseen;
  std::vector<c10::DataPtr> memory;
  for (const Weight& weight : weights_) {
    const c10::DeviceGuard guard(weight.storage.device());
    memory.push_back(c10::GetAllocator(weight.storage.device().type())->allocate(weight.storage.nbytes()));
  }
  let_wait(stream_now(copies_.device()), copies_);
  for (size_t i = 0; i < weights_.size(); ++i) {
    give_memory(weights_[i].storage, std::move(memory[i]));
    storage_bytes(weights_[i].storage).copy_(weights_[i].values, /*non_blocking=*/true);
  }
}

int64_t HostHome::bytes_of(size_t number) const { return room_of(weights_[number].storage); }

bool HostHome::has_room(size_t number) const { return extents_.has_room(bytes_of(number)); }

void HostHome::bring(size_t number) {
  const HomeCopies copies(copies_);
  Weight& weight = weights_[number];
  const auto place = extents_.take(bytes_of(number));
  if (place) {
    char* const memory = static_cast<char*>(window_.mutable_data_ptr()) + *place;
    give_memory(weight.storage, borrowed_memory(memory, copies_.device()));
  } else {
    give_memory(weight.storage, c10::GetAllocator(copies_.device_type())->allocate(weight.storage.nbytes()));
  }
  weight.place = place;
  weight.is_in = true;
  try {
    storage_bytes(weight.storage).copy_(weight.values, /*non_blocking=*/true);
    weight.copied.emplace(copies_.device_type()).record(copies_);
  } catch (...) {
    let_go(number, /*is_written=*/false);
    throw;
  }
}

void HostHome::use(size_t number) {
  Weight& weight = weights_[number];
  const c10::Stream current = stream_now(copies_.device());
  if (std::ranges::find(weight.users, current) != weight.users.end()) {
    return;
  }
  weight.copied->block(current);
  let_use(memory_of(weight.place ? window_.storage() : weight.storage), current);
  weight.users.push_back(current);
}

void HostHome::finish_copies(size_t number) {
  if (const auto& copied = weights_[number].copied) {
    copied->synchronize();
  }
}

// Copies may write over the memory when its users have ended.
void HostHome::let_go(size_t number, bool is_written) {
  Weight& weight = weights_[number];
  if (!weight.is_in) {
    return;
  }
  const HomeCopies copies(copies_);
  for (const c10::Stream& user : weight.users) {
    let_wait(copies_, user);
  }
  if (is_written) {
    weight.values.copy_(storage_bytes(weight.storage), /*non_blocking=*/true);
    weight.copied.emplace(copies_.device_type()).record(copies_);
  }
  take_memory(weight.storage, weight.values);
  if (weight.place) {
    extents_.give_back(*weight.place, bytes_of(number));
  }
  weight.place.reset();
  weight.is_in = false;
  weight.users.clear();
}

}  // namespace snug::detail
