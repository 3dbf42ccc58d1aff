#pragma once
// The policy for tensors that a checkpoint's policy offloads.

#include <memory>

#include "src/memory/saved_tensor_policy.h"

namespace snug::detail {

/// Like SaveOnHost with its default options; one for the process.
std::shared_ptr<SavedTensorPolicy> offload_packer();

}  // namespace snug::detail
