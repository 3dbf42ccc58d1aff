#pragma once
// The policies that take tensors which a checkpoint's policy offloads or compresses.

#include <memory>

#include "snug/memory/detail/saved_tensor_policy.h"

namespace snug::detail {

/// Like SaveOnHost with its default options; one for the process.
std::shared_ptr<SavedTensorPolicy> offload_packer();
/// Keeps floating tensors wider than BF16 in BF16. Unpacked tensors have memory of their own.
std::shared_ptr<SavedTensorPolicy> compress_packer();

}  // namespace snug::detail
