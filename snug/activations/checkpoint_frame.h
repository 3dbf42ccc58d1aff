#pragma once
// What checkpoint() is made of, without its templates.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

struct FrameOptions {
  bool preserve_rng_state;
  bool early_stop;
  bool check_metadata;
  std::string label;
};

/// While it lives, tensors saved on this thread are dropped; `recompute(inputs)` brings them back in backward.
class [[nodiscard]] CheckpointForward final {
 public:
  CheckpointForward(FrameOptions options, std::vector<at::Tensor> inputs,
                    std::function<void(const std::vector<at::Tensor>&)> recompute);
  ~CheckpointForward();
  /// To be called when the forward has come to its end. Throws ConfigError if it wrote to one of `inputs`.
  void finish();
  CheckpointForward(const CheckpointForward&) = delete;
  CheckpointForward& operator=(const CheckpointForward&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug::detail
