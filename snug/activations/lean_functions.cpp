#include "snug/activations/lean_functions.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "snug/activations/checkpoint.h"
#include "snug/activations/detail/packed_mask.h"
#include "snug/core/detail/computed_gradients.h"
#include "snug/precision/detail/fp32_reductions.h"

namespace snug {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool needs_gradient(const at::Tensor& x) {
  return x.defined() && at::GradMode::is_enabled() && x.requires_grad() && x.numel() > 0;
}

/// `mask`, bool and without gaps, is kept in bits, together with its shape.
void save_mask(AutogradContext* context, const at::Tensor& mask) {
  context->save_for_backward({detail::pack_mask(detail::flat(mask))});
  context->saved_data["sizes"] = mask.sizes().vec();
  context->saved_data["strides"] = mask.strides().vec();
}

at::Tensor saved_mask(AutogradContext* context) {
  const auto sizes = context->saved_data["sizes"].toIntVector();
  return detail::unpack_mask(detail::saved_for_computing(context).front(), c10::multiply_integers(sizes))
      .as_strided(sizes, context->saved_data["strides"].toIntVector());
}

struct Relu : torch::autograd::Function<Relu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    at::Tensor y = at::relu(x);
    save_mask(context, y.ne(0));  // positive, or NaN, which lets its gradient through, as in LibTorch
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {at::threshold_backward(grads[0], saved_mask(context).to(grads[0].scalar_type()), 0)};
  }
};

// LibTorch's dropout on a CPU multiplies by a tensor of factors, 0 or 1 / (1 - p) in x's type, and keeps that.
struct FactorDropout : torch::autograd::Function<FactorDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double p) {
    at::Tensor factors = at::empty_like(x).bernoulli_(1 - p);
    save_mask(context, factors.ne(0));
    context->saved_data["p"] = p;
    return at::mul(x, factors.div_(1 - p));
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    at::Tensor factors = saved_mask(context).to(grads[0].scalar_type());
    return {grads[0] * factors.div_(1 - context->saved_data["p"].toDouble()), at::Tensor()};
  }
};

// On other devices it has a kernel of its own, and keeps a mask of bytes.
struct MaskDropout : torch::autograd::Function<MaskDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double p) {
    auto [y, mask] = at::native_dropout(x, p, true);
    save_mask(context, mask);
    context->saved_data["p"] = p;
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const double scale = 1 / (1 - context->saved_data["p"].toDouble());
    const at::Tensor mask = saved_mask(context);
    // The first is for a backward that is differentiated again.
    return {at::GradMode::is_enabled() ? grads[0] * mask * scale : at::native_dropout_backward(grads[0], mask, scale),
            at::Tensor()};
  }
};

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// Autocast is going to cast x to FP32 in front of a normalisation.
bool is_cast_to_float(const at::Tensor& x) {
  return (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf) &&
         at::autocast::is_autocast_enabled(x.device().type()) && (!x.is_cpu() || detail::fp32_reductions());
}

CheckpointOptions options_for(const char* name) { return {.preserve_rng_state = false, .label = name}; }

}  // namespace

at::Tensor relu(const at::Tensor& x) { return needs_gradient(x) ? Relu::apply(x) : at::relu(x); }

at::Tensor dropout(const at::Tensor& x, double p, bool training) {
  if (!training || !(p > 0 && p < 1) || !needs_gradient(x) || !at::isFloatingType(x.scalar_type())) {
    return at::dropout(x, p, training);
  }
  return x.is_cpu() ? FactorDropout::apply(x, p) : MaskDropout::apply(x, p);
}

at::Tensor rms_norm(const at::Tensor& x, at::IntArrayRef normalized_shape, const at::Tensor& weight,
                    std::optional<double> eps) {
  return checkpoint(
      options_for("rms_norm"),
      [shape = normalized_shape.vec(), eps](const at::Tensor& input, const at::Tensor& w) {
        return at::rms_norm(input, shape, if_defined(w), eps);
      },
      x, weight);
}

at::Tensor layer_norm(const at::Tensor& x, at::IntArrayRef normalized_shape, const at::Tensor& weight,
                      const at::Tensor& bias, double eps) {
  const auto norm = [shape = normalized_shape.vec(), eps](const at::Tensor& input, const at::Tensor& w,
                                                          const at::Tensor& b) {
    return at::layer_norm(input, shape, if_defined(w), if_defined(b), eps);
  };
  return is_cast_to_float(x) ? checkpoint(options_for("layer_norm"), norm, x, weight, bias) : norm(x, weight, bias);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return checkpoint(
      options_for("swiglu"), [](const at::Tensor& g, const at::Tensor& u) { return at::silu(g) * u; }, gate, up);
}

}  // namespace snug
