#pragma once
// TapeRegion: what a checkpointed region asks of its OpTape. op_tape_region.cpp says how the tape serves a region.

#include <any>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "snug/checkpoint.h"
#include "src/memory/saved_tensor_policy.h"

namespace snug::detail {

struct TapeRegion {
  std::string name;                                      // in errors
  CheckpointPolicy policy = {};                          // empty: no result is kept
  std::shared_ptr<SavedTensorPolicy> outside = nullptr;  // keeps tensors from outside of the region; null: the tape
};

/// Memory from outside of a region, as kept by a policy outside.
struct KeptOutside {
  std::shared_ptr<SavedTensorPolicy> policy;
  at::Tensor shape;  // of the packed tensor; has no memory
  std::any packed;
  bool is_asked_always = false;  // in backward, also if the program still has the memory
};

}  // namespace snug::detail
