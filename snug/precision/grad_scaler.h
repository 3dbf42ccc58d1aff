#pragma once
// GradScaler: dynamic loss scaling, so that small FP16 gradients do not vanish. Semantics and defaults are those of Python's
// torch.amp.GradScaler.
//
//   snug::GradScaler scaler;
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                            // only needed before clipping
//   snug::clip_grad_norm_(model->parameters(), 1.0);
//   bool stepped = scaler.step(optimizer);                 // false: skipped, a gradient was infinite or NaN
//   scaler.update();

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/core/state.h"

namespace torch::optim {
class Optimizer;
}

namespace snug {

struct GradScalerOptions {
  /// Where the scale begins. 2^16, as in Python: large enough to matter, found to be too large within a few skipped steps.
  double init_scale = 65536.0;
  /// What the scale is multiplied with after `growth_interval` good steps in a row. Must be > 1.
  double growth_factor = 2.0;
  /// What it is multiplied with after a step with an infinite or NaN gradient. Must be in (0, 1).
  double backoff_factor = 0.5;
  /// Good steps in a row before the scale grows.
  int64_t growth_interval = 2000;
  /// false: scale() returns its argument, step() steps, update() does nothing.
  bool enabled = true;
};

/// Whether a step was made. Where the optimizer decides on the device, converting to bool waits for it; nothing else does.
class StepOutcome {
 public:
  explicit StepOutcome(bool stepped) : stepped_(stepped) {}
  explicit StepOutcome(std::vector<at::Tensor> found_inf) : found_inf_(std::move(found_inf)) {}
  /// True if the parameters were updated.
  operator bool() const;  // NOLINT(google-explicit-constructor): reads as in `if (scaler.step(optimizer))`

 private:
  mutable std::optional<bool> stepped_;
  std::vector<at::Tensor> found_inf_;
};

/// One scale, any number of losses and optimizers; each optimizer skips for itself. Call order per optimizer and update():
/// [unscale_], step; then one update() after all steps. A wrong order is a ConfigError.
class GradScaler {
 public:
  /// Throws ConfigError for factors or intervals out of range.
  explicit GradScaler(GradScalerOptions options = {});
  /// Not copied: a copy would share the scale's tensor, and both would change it.
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  GradScaler(GradScaler&&) = default;
  GradScaler& operator=(GradScaler&&) = default;

  /// `output` times the scale, on the output's device.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and notes whether any is not finite. No
  /// host synchronisation. Throws ConfigError on a second call before update(), after step(), before any scale(), or for FP16 gradients
  /// (naming the parameter): those come from FP16 weights, which need FP32 master weights.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales if that was not done, and steps unless a gradient is not finite. Waits for the device unless the optimizer is
  /// GradientScalingAware, as snug's are. Empties autocast's cache of cast weights, as those are old now.
  StepOutcome step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale to what the steps found, or sets it to `new_scale`, and readies the optimizers for the next round.
  void update(std::optional<double> new_scale = {});

  /// Forgets what unscale_ and step did since the last update(): for a step that is given up.
  void cancel();

  /// The scale; 1 if disabled. Waits for the device.
  double get_scale() const;
  bool is_enabled() const { return options_.enabled; }
  const GradScalerOptions& options() const { return options_; }

  /// Python's names: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker. Empty if disabled. Call after update().
  StateDict state_dict() const;
  /// Throws ConfigError for an empty dictionary (saved by a disabled scaler) and for values out of range; then nothing has changed.
  /// No effect if disabled.
  void load_state_dict(const StateDict& state);

 private:
  enum class Stage { Ready, Unscaled, Stepped };
  using FoundInf = std::vector<std::pair<c10::Device, at::Tensor>>;  // FP32 scalars: 1 if not finite
  struct PerOptimizer {
    Stage stage = Stage::Ready;
    FoundInf found_inf;
  };

  void make_tensors(c10::Device device);
  const at::Tensor& scale_on(c10::Device device, std::vector<std::pair<c10::Device, at::Tensor>>& copies) const;
  FoundInf divide_and_check(torch::optim::Optimizer& optimizer, const at::Tensor& inverse, bool allow_fp16) const;
  StepOutcome step_or_skip(torch::optim::Optimizer& optimizer);
  StepOutcome step_on_device(torch::optim::Optimizer& optimizer, PerOptimizer& state);

  GradScalerOptions options_;
  at::Tensor scale_;           // FP32 scalar; made on the device of the first scaled output
  at::Tensor growth_tracker_;  // INT32 scalar: good steps in a row
  double initial_scale_;
  int64_t initial_growth_tracker_ = 0;
  std::unordered_map<const torch::optim::Optimizer*, PerOptimizer> per_optimizer_;
};

}  // namespace snug
