#include "src/memory/weights_on_host.h"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/host_memory.h"
#include "src/memory/absent_storage.h"
#include "src/memory/cpu_allocator.h"

namespace snug {
namespace detail {

at::Tensor made_on_host(const at::Tensor& tensor, c10::ScalarType dtype, c10::Device device) {
  const at::Tensor values =
      in_host_memory("move_with_weights_on_host", "the model's weights", "or train a smaller model", [&] {
        return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(dtype).pinned_memory(true));
      });
  values.copy_(tensor);
  const size_t bytes = values.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                       /*resizable=*/false);
  take_memory(
      storage, at::empty({0}, at::kByte).set_(values.storage(), 0, {static_cast<int64_t>(bytes)}, {1}),
      "this weight is in the host's memory (move_with_weights_on_host), and comes to the device for operators in "
      "the steps of a Stepper; give the Stepper a budget with memory and offload, and an optimizer of snug");
  const auto key = c10::computeDispatchKey(dtype, c10::kStrided, device);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                       c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(values.sizes(), values.strides());
  return made;
}

void replace_content(const at::Tensor& tensor, const at::Tensor& moved) {
  if (!moved.device().is_privateuseone()) {
    tensor.set_data(moved);
    return;
  }
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
  tensor.unsafeGetTensorImpl()->_change_backend_component_keys(moved.device());
}

}  // namespace detail

void move_with_weights_on_host(torch::nn::Module& model, c10::Device device) {
  if (device.is_cpu()) {
    throw ConfigError(
        "move_with_weights_on_host: the device is the CPU, whose weights are in the host's memory anyway; for weights in "
        "files make the model under TensorsInFile");
  }
  if (!device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  const at::NoGradGuard no_grad;
  const auto move = [&](const at::Tensor& tensor, bool may_stay) {
    if (tensor.device() != device) {
      const at::Tensor here = tensor.detach();
      const bool stays = may_stay && here.is_non_overlapping_and_dense() && here.nbytes() >= detail::in_file_from();
      detail::replace_content(tensor, stays ? detail::made_on_host(here, here.scalar_type(), device) : here.to(device));
    }
  };
  for (const at::Tensor& parameter : model.parameters()) {
    move(parameter, /*may_stay=*/true);
  }
  for (const at::Tensor& buffer : model.buffers()) {
    move(buffer, /*may_stay=*/false);
  }
}

}  // namespace snug
