#pragma once
// GradScaler: loss scaling, so that small FP16 gradients do not vanish. Semantics and defaults are the same as in
// Python's torch.amp.GradScaler. Additions: a static scale, a smallest scale, hysteresis, and an error after a number
// of skipped steps in a row.
//
//   snug::GradScaler scaler;
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                            // only needed before clipping
//   snug::clip_grad_norm_(model->parameters(), 1.0);
//   bool stepped = scaler.step(optimizer);                 // false: skipped, a gradient was infinite or NaN
//   scaler.update();

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/state.h"

namespace torch::optim {
class Optimizer;
}

namespace snug {

struct GradScalerOptions {
  /// The first scale. 2^16, as in Python: large enough to matter. If the scale is too large, a few steps are skipped.
  double init_scale = 65536.0;
  /// The factor of the scale after `growth_interval` good steps in a row. Must be > 1.
  double growth_factor = 2.0;
  /// The factor of the scale after a step with an infinite or NaN gradient. Must be in (0, 1).
  double backoff_factor = 0.5;
  /// Good steps in a row before the scale grows.
  int64_t growth_interval = 2000;
  /// false: scale() returns its argument, step() steps, update() does nothing.
  bool enabled = true;
  /// false: the scale stays at `init_scale` until update(new_scale); steps are skipped as usual. With a power of two,
  /// FP32 gradients that neither overflow nor underflow are bit-equal to unscaled gradients. Any other scale gives a
  /// warning through LibTorch's warnings.
  bool dynamic = true;
  /// The scale does not fall below min_scale. 0: no bound, as in Python. Without a bound, a scale of 2^-128 or less has
  /// an infinite inverse in FP32, so that every step is skipped for ever. At most init_scale. 1 is a good value for a
  /// long run.
  double min_scale = 0.0;
  /// The scale backs off at the hysteresis-th step with an infinite or NaN gradient since the scale last grew, and at
  /// each such step after that. 1: at the first step. As in Megatron-LM, whose default is 2. Steps with an infinite or
  /// NaN gradient are skipped in any case. >= 1.
  int64_t hysteresis = 1;
  /// After this number of skipped steps in a row, update() throws NonFinite, which names the first parameter whose
  /// gradient is not finite. 0: never. With any other number, each update() reads the device, and so waits for the
  /// device.
  int64_t max_consecutive_skips = 0;
};

/// One scale, any number of losses and optimizers; each optimizer skips for itself. Call order per optimizer and
/// update(): [unscale_], step; then one update() after all steps. A wrong order is a ConfigError.
class GradScaler {
 public:
  /// Whether a step was made. If the optimizer decides on the device, conversion to bool waits for the device; no other
  /// operation waits.
  class Outcome {
   public:
    explicit Outcome(bool stepped) : stepped_(stepped) {}
    explicit Outcome(std::vector<at::Tensor> found_inf) : found_inf_(std::move(found_inf)) {}
    /// True if the parameters were updated.
    operator bool() const;  // NOLINT(google-explicit-constructor): reads as in `if (scaler.step(optimizer))`

   private:
    mutable std::optional<bool> stepped_;
    std::vector<at::Tensor> found_inf_;
  };

  /// Throws ConfigError for values out of range.
  explicit GradScaler(GradScalerOptions options = {});
  /// Not copied: a copy shares the scale's tensor, and both scalers change the tensor.
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;
  ~GradScaler();

  /// `output` times the scale, on the output's device.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and notes whether a gradient is not
  /// finite. No host synchronisation. Throws ConfigError on a second call before update(), after step(), before any
  /// scale(), or for FP16 gradients (naming the parameter). FP16 gradients come from FP16 weights, which need FP32
  /// master weights.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Whether step() will skip, known after unscale_: later changes of the gradients do not count. Waits for the device.
  bool will_skip(const torch::optim::Optimizer& optimizer) const;

  /// Unscales if the gradients are not unscaled yet, and steps unless a gradient is not finite. Waits for the device
  /// unless the optimizer is GradientScalingAware, as snug's optimizers are. Empties autocast's cache of cast weights,
  /// because the casts are out of date. If no parameter of the optimizer has a gradient, an optimizer that is
  /// GradientScalingAware updates nothing, as Python's fused optimizers do; for any other optimizer the call is a
  /// ConfigError, as in Python.
  Outcome step(torch::optim::Optimizer& optimizer);

  /// Adapts the scale to the results of the steps, or sets the scale to `new_scale`, and prepares the optimizers for
  /// the next round. Then throws NonFinite if max_consecutive_skips is reached. Throws ConfigError if nothing was
  /// stepped, or if `new_scale` is not a valid scale or is below min_scale.
  void update(std::optional<double> new_scale = {});
  /// The same with a scale that is a tensor: of one number, without gradient. Waits for the tensor's device.
  void update(const at::Tensor& new_scale);

  /// Forgets the calls of unscale_ and step since the last update(): for a step that is abandoned.
  void cancel();

  /// Names for error messages, such as a module's named_parameters(); without names, messages give group and index.
  void name_parameters(std::vector<std::pair<std::string, at::Tensor>> names);

  /// For several processes that step together. `agree` gets an FP32 scalar, 1 if a gradient is not finite, else 0, and
  /// must set the scalar to 1 if any process has a 1: ProcessGroup::all_reduce with
  /// ReduceOp::Max does. A Stepper with data_parallel calls agree_by itself.
  void agree_by(std::function<void(const at::Tensor& found_inf)> agree);

  /// The scale; 1 if disabled. Waits for the device.
  double get_scale() const;
  bool is_enabled() const;
  const GradScalerOptions& options() const;

  /// Python's names: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker. In addition,
  /// _hysteresis_tracker and _consecutive_skips if those options are on; Python ignores both. Empty if disabled. Call
  /// state_dict() after update().
  StateDict state_dict() const;
  /// Loads a state of GradScaler or of Python's. A scale below min_scale is raised to min_scale. Throws ConfigError for
  /// an empty dictionary (saved by a disabled scaler) and for values out of range; then nothing has changed. No effect
  /// if disabled.
  void load_state_dict(const StateDict& state);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
