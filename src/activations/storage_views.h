#pragma once
// Tensors made on a storage without the dispatcher, so that no policy takes the tensors for results.

#include <utility>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// All of a storage, as a tensor of bytes on the storage's memory.
inline at::Tensor storage_bytes(const c10::Storage& storage) {
  const auto key = c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device());
  auto bytes = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                        caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return bytes;
}

/// All of a tensor's storage, as bytes; the result does not share the tensor's version.
inline at::Tensor storage_bytes(const at::Tensor& tensor) { return storage_bytes(tensor.storage()); }

/// A new tensor with the same view of another storage, or of the same storage. `version` counts the new tensor's
/// writes.
inline at::Tensor on_storage(const at::Tensor& tensor, const c10::Storage& storage,
                             c10::VariableVersion version = c10::VariableVersion(0)) {
  auto impl = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(std::move(version), true);
  impl->set_storage_keep_dtype(storage);
  return at::Tensor(std::move(impl));
}

/// The same view without memory, for a storage that comes later.
inline at::Tensor without_memory(const at::Tensor& tensor) {
  const auto no_memory = [](c10::Device device) {
    return c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, false);
  };
  thread_local c10::Storage latest = no_memory(c10::kCPU);  // for all tensors, as long as the device stays the same
  if (latest.device() != tensor.device()) {
    latest = no_memory(tensor.device());
  }
  const c10::VariableVersion not_counted(c10::VariableVersion::DISABLED);  // nobody writes to the result
  return on_storage(tensor, latest, not_counted);
}

}  // namespace snug::detail
