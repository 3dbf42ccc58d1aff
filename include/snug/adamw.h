#pragma once
// AdamW and Adam: torch's fused kernels with torch's optimizer interface. An update makes one pass over parameters,
// gradients and moments, the least that memory bandwidth requires. torch::optim::AdamW makes about ten passes.
//
//   snug::AdamW optimizer(model->parameters(), {.lr = 3e-4, .weight_decay = 0.1});
//   loss.backward();
//   optimizer.step();
//
// AdamW8bit: AdamW whose two moments take one byte an element instead of four, in blocks with a common maximum. The
// state takes a quarter of the memory, and each step moves less memory.
//
//   snug::AdamW8bit optimizer(model->parameters(), {.lr = 3e-4});

#include <tuple>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "snug/fused_optimizer.h"

namespace snug {

struct AdamWOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0.01;  ///< decoupled from the gradient, as the W says
  /// For FP16 and BF16 parameters: keeps an FP32 copy of each parameter in the state, updates the copy, and rounds the
  /// copy into the parameter. Do not combine with Weights::Low, because the Stepper then holds the masters.
  bool master_weights = false;
  /// For BF16 parameters without masters: rounds up or down at random, so that steps below BF16's resolution count on
  /// average. The random numbers depend on the step's number and on the element's number among the elements of all
  /// parameters, in order. A resumed run has the same random numbers, and so have parameters that are cut. No generator
  /// is used.
  bool stochastic_rounding = false;
};

/// Decoupled weight decay regularisation (Loshchilov & Hutter 2019, arXiv:1711.05101), on at::_fused_adamw_ or snug's
/// own kernels. The groups hold torch::optim::AdamWOptions. State per parameter: step, exp_avg, exp_avg_sq, and with
/// master weights master. On devices without such kernels an update of 16-bit parameters takes a workspace, see
/// workspace_bytes(): at most 16 MiB a group with masters, 68 MiB with stochastic rounding, and 2 KiB for each tensor.
class AdamW : public FusedOptimizer {
 public:
  /// Throws ConfigError, naming the parameter or option, for an empty list, options out of range, and parameters that
  /// are not floating point. step() throws ConfigError for 16-bit parameters, unless an option above provides for
  /// 16-bit parameters.
  explicit AdamW(std::vector<at::Tensor> parameters, AdamWOptions options = {});
  /// Groups without options of their own take `options`; so do fields that a group leaves at torch's defaults. amsgrad
  /// is not offered.
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options = {});

  bool takes(at::ScalarType dtype) const override;
  int64_t workspace_bytes() const override;

 protected:
  std::string_view why_not() const override;
  void make_state(ParameterState& state, const at::Tensor& parameter,
                  const torch::optim::OptimizerOptions& options) const override;
  std::optional<std::string_view> copied_state() const override { return "master"; }
  std::function<void()> prepare(const Work& work) const override;

 private:
  bool master_weights_;
  bool stochastic_rounding_;
};

struct AdamOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;  ///< added to the gradient (L2)
};

/// Kingma & Ba 2015, arXiv:1412.6980, on at::_fused_adam_. The groups hold torch::optim::AdamOptions. The parameters
/// are FP32 or FP64.
class Adam : public FusedOptimizer {
 public:
  explicit Adam(std::vector<at::Tensor> parameters, AdamOptions options = {});
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions options = {});

 protected:
  void make_state(ParameterState& state, const at::Tensor& parameter,
                  const torch::optim::OptimizerOptions& options) const override;
  std::function<void()> prepare(const Work& work) const override;
};

struct AdamW8bitOptions {
  double lr = 1e-3;
  std::tuple<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0.01;
  /// Parameters with fewer elements keep FP32 moments. Such parameters are many, small, and often sensitive (biases,
  /// norms).
  int64_t min_elements = 4096;
  /// For BF16 parameters, after FlashOptim (arXiv:2602.23349): the weight that is updated has 24 bits. The nearest BF16
  /// number is the model's parameter, and a byte in the state has the rest. With the gradient, a parameter takes 7
  /// bytes, or 5 with StepInBackward. A step below 2^-17 to 2^-16 of the weight is lost. A parameter that is written
  /// between steps keeps the parameter's correction: at most half of BF16's last place. Parameters with fewer than
  /// min_elements have an FP32 master instead. Do not combine with Weights::Low, because the Stepper then holds the
  /// masters.
  bool split_weights = false;
};

/// 8-bit Optimizers via Block-wise Quantization (Dettmers et al. 2022, arXiv:2110.02861). FP32 parameters, and BF16
/// parameters with split_weights. The updates are made on the CPU: for parameters on a device, call
/// keep_state_in(StateOnHost{}) before the first step, or give `offload` in a Stepper's budget. The groups hold
/// torch::optim::AdamWOptions. State per parameter: step, exp_avg and exp_avg_sq as bytes, exp_avg_max and
/// exp_avg_sq_max with an FP32 number per 256 elements. With a GradScaler, the gradients in memory stay scaled: the
/// update unscales on the way.
class AdamW8bit : public FusedOptimizer {
 public:
  /// Throws ConfigError, naming the parameter or option, for an empty list, options out of range, and parameters that
  /// are neither FP32 nor 16-bit. step() throws ConfigError for 16-bit parameters, unless split_weights provides for
  /// 16-bit parameters, for parameters that are not contiguous, and for parameters on a device with the state there.
  explicit AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions options = {});
  explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamW8bitOptions options = {});

  /// Blocks of 256 elements share a scale, and small parameters have none.
  int64_t shard_multiple() const override { return 0; }
  /// False for parameters on a device: the kernel runs on the CPU, so the state is on the host or in a file.
  bool may_stay_on_device() const override;
  bool takes(at::ScalarType dtype) const override {
    return dtype == at::kFloat || (dtype == at::kBFloat16 && split_weights_);
  }

 protected:
  std::string_view why_not() const override {
    return "it updates FP32 parameters, and BF16 ones with {.split_weights = true}; convert the model, or let a Stepper "
           "hold masters (Weights::Low)";
  }
  void make_state(ParameterState& state, const at::Tensor& parameter,
                  const torch::optim::OptimizerOptions& options) const override;
  std::optional<std::string_view> copied_state() const override { return "master"; }
  int64_t state_multiple() const override;
  std::function<void()> prepare(const Work& work) const override;

 private:
  bool is_small(const at::Tensor& parameter) const { return parameter.numel() < min_elements_; }

  int64_t min_elements_;
  bool split_weights_;
};

}  // namespace snug
