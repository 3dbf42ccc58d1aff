#pragma once
// AdamW: torch's fused kernel behind torch's optimizer interface. One pass over parameters, gradients and moments, which is what
// memory bandwidth allows; torch::optim::AdamW makes about ten.
//
//   snug::AdamW optimizer(model->parameters(), {.lr = 3e-4, .weight_decay = 0.1});
//   loss.backward();
//   optimizer.step();

#include <vector>

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include "snug/core/gradient_scaling.h"
#include "snug/core/stateful_optimizer.h"

namespace snug {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  ///< decoupled from the gradient, as the W says
};

/// Decoupled weight decay regularisation (Loshchilov & Hutter 2019, arXiv:1711.05101), on at::_fused_adamw_. Its groups hold
/// torch::optim::AdamWOptions, so torch's schedulers work on it. With a GradScaler, unscaling and skipping happen in the same pass
/// and nothing waits for the device; a skipped step leaves the step count of bias correction where it was.
class AdamW : public torch::optim::Optimizer, public GradientScalingAware, public StatefulOptimizer {
 public:
  /// Throws ConfigError, naming the parameter or option, for an empty list, parameters that are not FP32 or FP64, or options out of range.
  explicit AdamW(std::vector<at::Tensor> parameters, AdamWOptions options = {});
  /// Groups without options of their own take `options`; so do fields that a group leaves at torch's defaults. amsgrad is not offered.
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options = {});

  /// Updates every parameter that has a gradient. All memory is allocated, and all shapes, types and devices are checked (ConfigError),
  /// before anything is written: an error leaves parameters and state as they were. Returns the closure's loss, if there is one; a closure
  /// together with a GradScaler is a ConfigError.
  at::Tensor step(LossClosure closure = nullptr) override;

  void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) override;

  /// Python's layout: state.<index>.{step, exp_avg, exp_avg_sq} and param_groups.<index>.{lr, beta1, beta2, eps, weight_decay}.
  StateDict state_dict() const override;
  /// Copies. Throws CorruptFile, naming the parameter's index, where the number of parameters or a shape differs; then nothing has changed.
  void load_state_dict(const StateDict& state) override;

  /// torch's archive, for torch::save and torch::load. Loading checks like load_state_dict.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  at::Tensor grad_scale_;
  at::Tensor found_inf_;
};

}  // namespace snug
