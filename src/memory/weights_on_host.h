#pragma once
// Tensors of a device whose values are in the host's memory from the beginning. See move_with_weights_on_host
// (snug/memory.h).

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace snug::detail {

/// A tensor of `device` without memory of the device. The tensor's storage keeps the values of `tensor`, as `dtype`, in
/// page-locked memory (kept_values). Throws Error if the host has too little memory.
at::Tensor made_on_host(const at::Tensor& tensor, c10::ScalarType dtype, c10::Device device);

/// The parameter or buffer `tensor` gets the memory and the device of `moved`, also on devices that LibTorch's modules
/// refuse (PrivateUse1). For such a device autograd must not have used `tensor` yet.
void replace_content(const at::Tensor& tensor, const at::Tensor& moved);

}  // namespace snug::detail
