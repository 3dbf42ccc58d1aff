#pragma once
// SGD: torch's fused kernel behind torch's optimizer interface.
//
//   snug::SGD optimizer(model->parameters(), {.lr = 0.1, .momentum = 0.9});

#include <vector>

#include <torch/optim/sgd.h>

#include "snug/fused_optimizer.h"

namespace snug {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;  ///< added to the gradient (L2)
  bool nesterov = false;    ///< needs momentum, and no dampening
};

/// Stochastic gradient descent, with momentum as in torch.optim.SGD, on at::_fused_sgd_. The groups hold
/// torch::optim::SGDOptions. State per parameter: momentum_buffer if momentum is not 0. The parameters are FP32 or
/// FP64. With dampening, a GradScaler's step waits for the device (the first step has another formula, and only the
/// device knows whether the first step was skipped).
class SGD : public FusedOptimizer {
 public:
  /// Throws ConfigError, naming the parameter or option, for an empty list, parameters that are not floating point, or
  /// options out of range. step() throws ConfigError for 16-bit parameters.
  explicit SGD(std::vector<at::Tensor> parameters, SGDOptions options = {});
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions options = {});

 protected:
  void make_state(ParameterState& state, const at::Tensor& parameter,
                  const torch::optim::OptimizerOptions& options) const override;
  std::optional<std::string_view> optional_state() const override { return "momentum_buffer"; }
  std::function<void()> prepare(const Work& work) const override;

 private:
  struct Call;
  static void run(const torch::optim::SGDOptions& options, const Call& call, bool is_first_step,
                  const at::Tensor& grad_scale, const at::Tensor& found_inf);
};

}  // namespace snug
