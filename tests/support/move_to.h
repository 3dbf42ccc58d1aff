#pragma once
// Moving a model to a device.

#include <torch/torch.h>

namespace snug::testing {

/// module.to(device), also for devices for which LibTorch's C++ modules refuse it, as it replaces tensors'
/// contents only between kinds of device that it knows. The tensors must not have been used by autograd yet.
inline void move_to(torch::nn::Module& module, c10::Device device) {
  const auto move = [&](const torch::Tensor& tensor) {
    const torch::Tensor moved = tensor.detach().to(device);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
    tensor.unsafeGetTensorImpl()->_change_backend_component_keys(device);
  };
  for (const torch::Tensor& parameter : module.parameters()) {
    move(parameter);
  }
  for (const torch::Tensor& buffer : module.buffers()) {
    move(buffer);
  }
}

}  // namespace snug::testing
