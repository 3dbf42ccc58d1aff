#pragma once
// Recognises tensors with their values in memory of their own. Code that reads, copies, hashes or keeps the memory of a
// tensor asks has_bytes() first, and leaves other tensors alone.

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// The memory of a storage, also of a storage that throws when the storage is read, such as that of a weight on the
/// host. Asking does not count as a write.
inline const c10::DataPtr& memory_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

/// Whether the values of `tensor` are the bytes of the tensor's storage. The storage may have no bytes. False for:
/// - undefined tensors;
/// - zero tensors, which forward-mode AD makes: the storage has a size and no memory;
/// - tensors on the meta device;
/// - tensors without a storage: sparse tensors, tensors of oneDNN, tensors of vmap;
/// - wrappers of other tensors: wrappers of functionalisation, and subclasses with a __torch_dispatch__ in Python.
inline bool has_bytes(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return false;
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::Storage& storage = impl.unsafe_storage();
  if (!storage || impl.is_python_dispatch() || storage.device().is_meta()) {
    return false;
  }
  return memory_of(storage).get() != nullptr || storage.sym_nbytes().maybe_as_int() == 0;
}

/// Whether has_bytes() is true and the bytes can be read: the tensor has no elements, or the storage was not freed.
/// Sharding frees the storages of parameters that are not needed for a while.
inline bool can_be_read(const at::Tensor& tensor) {
  return has_bytes(tensor) && (tensor.numel() == 0 || tensor.storage().nbytes() > 0);
}

}  // namespace snug::detail
