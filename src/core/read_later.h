#pragma once
// read_later: values of a device for the host, without a wait for what the device does after them.

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace snug::detail {

/// Queues a copy of `tensor` to the host. The result returns the copy, and waits for the device's work up to the copy
/// alone. A tensor on the CPU is not copied.
inline std::function<at::Tensor()> read_later(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return [tensor] { return tensor; };
  }
  const at::Tensor host = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
  host.copy_(tensor.detach(), /*non_blocking=*/true);
  const auto copied = std::make_shared<c10::Event>(tensor.device().type());
  copied->record(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
  return [host, copied] {
    copied->synchronize();
    return host;
  };
}

}  // namespace snug::detail
