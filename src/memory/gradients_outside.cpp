#include "src/memory/gradients_outside.h"

#include <algorithm>
#include <exception>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>

#include "src/core/file_memory.h"
#include "src/core/host_memory.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/late_writes.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

// `count` elements from `begin` on, in the order of memory.
at::Tensor elements(const at::Tensor& tensor, int64_t begin, int64_t count) {
  return tensor.as_strided({count}, {1}, tensor.storage_offset() + begin);
}

at::Tensor on_host(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  return in_host_memory("Stepper", "the gradients", "or leave `offload` out", [&] {
    return at::empty_strided(sizes, strides, options.device(at::kCPU).pinned_memory(true));
  });
}

at::Tensor room_for(const at::Tensor& parameter, bool is_on_host) {
  const auto options = parameter.options();
  return is_on_host ? on_host(parameter.sizes(), parameter.strides(), options)
                    : at::empty_strided(parameter.sizes(), parameter.strides(), options.device(at::kCPU));
}

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

// Whether nobody else has the sum. The program, or a late update, may hold the gradient of the last step.
bool is_free(const at::Tensor& sum) { return sum.use_count() == 1 && sum.storage().use_count() == 1; }

c10::Event recorded_on(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

}  // namespace

void GradientsOutside::drop() {
  hooks_.reset();
  receive_all();
  gradients_.clear();
  passing_.reset();
}

void GradientsOutside::collect(const std::vector<Collected>& parameters,
                               const std::optional<std::filesystem::path>& directory) {
  const at::NoGradGuard no_grad;
  const auto files = directory ? std::make_unique<AllocationsInFile>(*directory) : nullptr;
  receive_all();
  hooks_ = std::make_unique<GradientHooks>();
  std::unordered_map<const void*, Gradient> before = std::exchange(gradients_, {});
  try {
    int64_t largest = 0;
    for (const auto& [leaf, parameter] : parameters) {
      const void* key = parameter.unsafeGetTensorImpl();
      const auto known = before.find(key);
      Gradient& gradient = gradients_[key];
      const bool stays = known != before.end() && is_like(known->second.sum, parameter) &&
                         (is_free(known->second.sum) || has_late_writes(known->second.sum.storage()));
      gradient.sum = stays ? std::move(known->second.sum) : room_for(parameter, /*is_on_host=*/!directory);
      largest = std::max(largest, static_cast<int64_t>(parameter.nbytes()));
      hooks_->set(
          leaf, [this, &gradient](const at::Tensor& complete) { add(gradient, complete); },
          GradientHooks::Runs::InProfilesToo);
    }
    if (!directory && (!passing_.defined() || passing_.numel() < largest)) {
      passing_ = on_host({largest}, {1}, at::kByte);
    }
  } catch (...) {
    drop();
    throw;
  }
}

// Adds with the bits of autograd's own sum, element by element.
void GradientsOutside::add(Gradient& to, const at::Tensor& parameter) {
  constexpr int64_t kAtOnce = 1 << 20;  // elements
  const at::NoGradGuard no_grad;
  const UnseenOperators unseen;
  at::Tensor& from = parameter.mutable_grad();
  receive();
  if (from.layout() != at::kStrided) {  // a first gradient of another layout stays in memory
    if (to.is_there) {
      to.sum.add_(from.to(to.sum.device()));
      from.reset();
    }
    return;
  }
  if (!to.is_there && !is_free(to.sum)) {
    to.sum = room_for(to.sum, /*is_on_host=*/true);
  }
  const bool is_first = !std::exchange(to.is_there, true);
  const bool is_in_order = from.strides() == to.sum.strides() && from.is_non_overlapping_and_dense();
  const auto add_some = [&](at::Tensor sum, const at::Tensor& more) {
    const at::Tensor here = more.to(sum.device());  // the host widens the numbers
    is_first ? sum.copy_(here) : sum.add_(here);
    let_go_of_pages(sum);
  };
  if (!is_in_order) {
    add_some(to.sum, from);
  } else if (!from.is_cpu()) {
    send(to, from, is_first);
  } else {
    for (int64_t begin = 0; begin < from.numel(); begin += kAtOnce) {
      const int64_t count = std::min(kAtOnce, from.numel() - begin);
      add_some(elements(to.sum, begin, count), elements(from, begin, count));
    }
  }
  from.reset();
}

void GradientsOutside::send(Gradient& to, at::Tensor& from, bool is_first) {
  const c10::impl::VirtualGuardImpl device(from.device().type());
  if (!copies_) {
    copies_ = device.getStreamFromGlobalPool(from.device());
  }
  const c10::Stream computing = device.getStream(from.device());
  const bool is_as_it_comes = is_first && from.scalar_type() == to.sum.scalar_type();
  const auto passing = passing_.narrow(0, 0, static_cast<int64_t>(from.nbytes())).view(from.scalar_type());
  const at::Tensor there = is_as_it_comes ? to.sum : passing.as_strided(from.sizes(), from.strides());
  recorded_on(computing).block(*copies_);
  {
    const c10::StreamGuard guard(*copies_);
    there.copy_(from, /*non_blocking=*/true);
  }
  leaving_.emplace(Leaving{from, computing, recorded_on(*copies_), {}});
  if (!is_as_it_comes) {
    leaving_->add = [sum = to.sum, there, is_first] { is_first ? sum.copy_(there) : sum.add_(there); };
  }
  const std::shared_ptr<void> end_of_pass(nullptr, [this](void*) { forget(); });  // also of a pass that fails
  torch::autograd::Engine::get_default_engine().queue_callback([this, end_of_pass] { receive(); });
}

void GradientsOutside::receive() {
  if (auto gradient = std::exchange(leaving_, std::nullopt)) {
    const at::NoGradGuard no_grad;
    const UnseenOperators unseen;
    gradient->copied.block(gradient->computing);
    if (gradient->add) {
      gradient->copied.synchronize();
      gradient->add();
    }
  }
}

void GradientsOutside::forget() noexcept {
  try {
    if (leaving_) {
      leaving_->add = {};
      receive();
    }
  } catch (const std::exception&) {  // the device is lost, and the next use of the device throws
  }
}

void GradientsOutside::receive_all() {
  receive();
  if (copies_) {
    recorded_on(*copies_).synchronize();
  }
}

void GradientsOutside::lend(const NamedTensors& parameters, bool lent) {
  receive_all();
  for (const auto& [name, parameter] : parameters) {
    const auto found = gradients_.find(parameter.unsafeGetTensorImpl());
    at::Tensor& gradient = parameter.mutable_grad();
    if (found == gradients_.end() || !found->second.is_there) {
      continue;
    }
    if (lent && !gradient.defined()) {
      gradient = found->second.sum;
    } else if (!lent && gradient.is_same(found->second.sum)) {
      gradient.reset();
    }
  }
}

}  // namespace snug::detail
