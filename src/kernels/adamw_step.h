#pragma once
// The numbers of one step of AdamW, for the kernels that make it.

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

}  // namespace snug::kernels
