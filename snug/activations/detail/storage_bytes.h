#pragma once

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// All of a tensor's storage, as bytes; shares its memory, not its version. Not made by the dispatcher, so that nobody takes it for a
/// result.
inline at::Tensor storage_bytes(const at::Tensor& tensor) {
  auto bytes = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), tensor.key_set(),
                                                        caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(tensor.storage().nbytes())});
  return bytes;
}

}  // namespace snug::detail
