#pragma once
// What takes tensors that a checkpoint's policy says to offload or to compress.

#include <memory>

#include "snug/memory/detail/saved_tensor_policy.h"

namespace snug::detail {

/// As SaveOnHost with its default options; one for the process.
std::shared_ptr<SavedTensorPolicy> offload_packer();
/// In BF16, what is wider and floating. What is unpacked has memory of its own.
std::shared_ptr<SavedTensorPolicy> compress_packer();

}  // namespace snug::detail
