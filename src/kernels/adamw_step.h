#pragma once
// The numbers of one step of AdamW, for the kernels that make it.

#include <cmath>

#include "src/kernels/host_device.h"

namespace snug::kernels {

/// Decoupled weight decay regularisation (Loshchilov & Hutter 2019, arXiv:1711.05101):
///   g = inverse_scale * gradient,  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
///   p = (1 - lr weight_decay) p - lr / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + eps).
/// The kernels compute in FP32, in the order of torch's fused CPU kernel. They do not look for infinities and NaN:
/// decide before the call whether to skip the step.
struct AdamWStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  double bias_correction1 = 1;  ///< 1 - beta1^step, where the first step is 1
  double bias_correction2 = 1;  ///< 1 - beta2^step
  float inverse_scale = 1;      ///< what gradients are multiplied by first: one over the loss scale
};

/// The constants of a step, computed in FP64 and rounded once, as torch does.
struct AdamWConstants {
  AdamWConstants() = default;
  explicit AdamWConstants(const AdamWStep& step)
      : inverse_scale(step.inverse_scale),
        decay(static_cast<float>(1 - step.lr * step.weight_decay)),
        from_gradient(1 - step.beta1 < 0.5 ? 0.0f : 1.0f),
        exp_avg_weight(static_cast<float>(1 - step.beta1) - from_gradient),
        beta2(static_cast<float>(step.beta2)),
        one_minus_beta2(static_cast<float>(1 - step.beta2)),
        eps(static_cast<float>(step.eps)) {
    correct(step.lr, step.bias_correction1, step.bias_correction2);
  }
  SNUG_HOST_DEVICE void correct(double lr, double bias_correction1, double bias_correction2) {
    root_bias_correction2 = static_cast<float>(std::sqrt(bias_correction2));
    negative_step_size = static_cast<float>(-(lr / bias_correction1));
  }

  float inverse_scale;
  float decay;
  float from_gradient;  // 1 where the mean is interpolated from the gradient: from the nearer end, as torch::lerp does
  float exp_avg_weight;
  float beta2;
  float one_minus_beta2;
  float eps;
  float root_bias_correction2;
  float negative_step_size;
};

}  // namespace snug::kernels
