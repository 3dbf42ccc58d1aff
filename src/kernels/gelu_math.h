#pragma once
// The arithmetic of bias_gelu's CUDA kernel, in FP32. nvcc compiles this header for the GPU; every other compiler
// compiles it for the host. So each formula is tested on all 65,536 FP16 inputs without a GPU.
//
//   gelu(z) = z / 2 (1 + tanh(u)),  u = sqrt(2 / pi) (z + 0.044715 z^3),  z = x + bias
//   (Hendrycks & Gimpel 2016, arXiv:1606.08415)
//
// Since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), the tanh can be avoided, and with it the loss of digits in 1 + tanh(u)
// near tanh = -1. tests/kernels/gelu_math_test.cpp states the largest errors.

#include <cmath>

#include "src/kernels/host_device.h"

namespace snug::kernels::detail {

constexpr float kGeluScale = 0.7978845608F;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715F;

SNUG_HOST_DEVICE float tanh_argument(float z, float cube) { return kGeluScale * (z + kGeluCubic * cube); }

/// The terms that gelu and its derivative share: e = exp(-|2 u|), which cannot overflow, 1 / (1 + e), and the factor of
/// z.
struct GeluTerms {
  float e, inverse, factor;
};

SNUG_HOST_DEVICE GeluTerms gelu_terms(float z) {
  const float argument = 2.0F * tanh_argument(z, z * z * z);
  const float e = expf(-fabsf(argument));
  const float inverse = 1.0F / (1.0F + e);
  return {e, inverse, argument < 0.0F ? e * inverse : inverse};
}

SNUG_HOST_DEVICE float gelu(float z) { return z * gelu_terms(z).factor; }

/// d gelu / dz = f + z f (1 - f) du,  f = 1 / (1 + exp(-2 u)),  f (1 - f) = e / (1 + e)^2,  du = 2 sqrt(2 / pi) (1 + 3
/// * 0.044715 z^2).
SNUG_HOST_DEVICE float gelu_derivative(float z) {
  const GeluTerms t = gelu_terms(z);
  const float slope = 2.0F * kGeluScale * (1.0F + 3.0F * kGeluCubic * z * z);
  return t.factor + z * t.e * t.inverse * t.inverse * slope;
}

}  // namespace snug::kernels::detail
