#pragma once
// The parts of checkpoint() that are no templates.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/activations/policy.h"

namespace snug {

/// How the recomputation is compared with the forward.
enum class Determinism {
  None,      ///< only the number of saved tensors
  Metadata,  ///< and shape, dtype and device of each, and by which operators of what it was made
  Values,    ///< and the bits of each, by a hash: reads every saved tensor twice, on a GPU over the bus
};

}  // namespace snug

namespace snug::detail {

struct FrameOptions {
  bool preserve_rng_state;
  bool draws_unseen;
  bool early_stop;
  Determinism determinism;
  std::string label;
  CheckpointPolicy policy;
};

/// While it lives, tensors saved on this thread are dropped; `recompute(inputs)` brings them back in backward.
class [[nodiscard]] CheckpointForward final {
 public:
  CheckpointForward(FrameOptions options, std::vector<at::Tensor> inputs,
                    std::function<void(const std::vector<at::Tensor>&)> recompute);
  ~CheckpointForward();
  /// Call it at the end of the forward. Throws ConfigError if the forward wrote to one of `inputs`.
  void finish();
  CheckpointForward(const CheckpointForward&) = delete;
  CheckpointForward& operator=(const CheckpointForward&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug::detail
