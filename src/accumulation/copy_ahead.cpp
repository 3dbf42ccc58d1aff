#include "src/accumulation/copy_ahead.h"

#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

// Memory is allocated and released in the order of the computing stream, as without a stream for copies. So peaks are
// the same, and no block is kept back for another stream.

namespace snug::detail {

Batch CopyAhead::start(const Batch& batch, c10::Device device) {
  if (device.is_cpu()) {
    return batch.to(device);
  }
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream computing = streams.getStream(device);
  if (!side_ || side_->device() != computing.device()) {
    side_ = streams.getStreamFromGlobalPool(computing.device());
  }
  std::vector<at::Tensor> moved;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const at::Tensor& tensor : batch.tensors()) {
    if (!tensor.is_cpu()) {
      moved.push_back(tensor.to(device));
      continue;
    }
    const at::Tensor pinned = tensor.pin_memory();
    moved.push_back(at::empty_like(pinned, pinned.options().device(device).pinned_memory(false)));
    copies.emplace_back(moved.back(), pinned);
  }
  if (!copies.empty()) {
    copy_.emplace(Copy{computing, c10::Event(device.type())});
    copy_->done.record(computing);  // so far: what the memory was used for before
    copy_->done.block(*side_);
    const c10::StreamGuard guard(*side_);
    const at::NoGradGuard no_grad;
    for (const auto& [to, from] : copies) {
      to.copy_(from, /*non_blocking=*/true);
    }
    copy_->done.record(*side_);
  }
  return Batch(std::move(moved));
}

void CopyAhead::wait() {
  if (copy_) {
    copy_->done.block(copy_->computing);
    copy_.reset();
  }
}

}  // namespace snug::detail
