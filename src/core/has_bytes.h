#pragma once
// Which tensors have their values in memory of their own. Code that reads, copies, hashes or keeps the memory of a
// tensor asks this first, and leaves other tensors as they are.

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Whether the values of `tensor` are the bytes of its storage, which may be none. False for:
/// - undefined tensors;
/// - zero tensors, which forward-mode AD makes: their storage has a size and no memory;
/// - tensors on the meta device;
/// - tensors without a storage: sparse ones, those of oneDNN, those of vmap;
/// - wrappers of other tensors: those of functionalisation, and subclasses with a __torch_dispatch__ in Python.
inline bool has_bytes(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return false;
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.has_storage() || impl.is_python_dispatch() || impl.unsafe_storage().device().is_meta()) {
    return false;
  }
  c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
  const bool has_memory = storage._mutable_data_ptr_no_checks().get() != nullptr;  // to ask is no write
  return has_memory || storage.sym_nbytes().maybe_as_int() == 0;
}

/// Whether these bytes can be read: unless it has no elements, its storage was not freed, as sharding frees those of
/// parameters that are not needed for a while.
inline bool can_be_read(const at::Tensor& tensor) {
  return has_bytes(tensor) && (tensor.numel() == 0 || tensor.storage().nbytes() > 0);
}

}  // namespace snug::detail
