#pragma once
// CompactAdamW: AdamW for BF16 models in 7 bytes a parameter, 5 with StepInBackward, instead of the 16 of FP32.
//
//   model->to(torch::kBFloat16);
//   snug::CompactAdamW optimizer(model->parameters(), {.lr = 3e-4});

#include <vector>

#include <torch/optim/adamw.h>

#include "snug/optim/fused_optimizer.h"

namespace snug {

struct CompactAdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// FlashOptim (arXiv:2602.23349): the weight that is updated has 24 bits. Its nearest BF16 number is the model's
/// parameter, and the rest is a byte in the state. Each moment takes a byte, in blocks of 64 elements with a common
/// scale. Bytes a parameter: 2 for the parameter, 2 for its gradient, 3 for the state, and 1/8 for the scales.
/// - A step is rounded to 24 bits: one below 2^-17 to 2^-16 of its weight is lost. With AdamW's steps of about lr that
///   concerns an lr below 1e-5 times the size of a weight.
/// - Whoever writes a parameter between steps leaves its correction as it is: at most half of BF16's last place.
/// - Its groups hold torch::optim::AdamWOptions. State per parameter: step, correction, exp_avg and exp_avg_sq as
///   bytes, exp_avg_scale and exp_avg_sq_scale with an FP32 number per 64 elements.
/// - With a GradScaler, gradients keep their scale: they are unscaled on the way.
class CompactAdamW : public FusedOptimizer {
 public:
  /// Throws ConfigError, naming the parameter or option, for an empty list, options out of range, and parameters of
  /// other types. step() throws it for FP16 parameters, for those that are not contiguous, and for other devices than
  /// the CPU.
  explicit CompactAdamW(std::vector<at::Tensor> parameters, CompactAdamWOptions options = {});
  explicit CompactAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, CompactAdamWOptions options = {});

  /// Blocks of 64 elements share a scale.
  int64_t shard_multiple() const override { return 0; }
  bool takes(at::ScalarType dtype) const override { return dtype == at::kBFloat16; }

  /// The weight of 24 bits that belongs to a parameter, in FP32, as a new tensor in the parameter's shape. It is the
  /// parameter itself before its first update. Throws ConfigError for a parameter that this optimizer does not hold,
  /// and while the state is in a file.
  at::Tensor full_weight(const at::Tensor& parameter) const;

 protected:
  std::string_view why_not() const override {
    return "it updates BF16 parameters; convert the model by to(torch::kBFloat16) before its optimizer is made, or "
           "take AdamW or AdamW8bit";
  }
  void make_state(ParameterState& state, const at::Tensor& parameter,
                  const torch::optim::OptimizerOptions& options) const override;
  int64_t state_multiple() const override;
  std::function<void()> prepare(const Work& work) const override;
};

}  // namespace snug
