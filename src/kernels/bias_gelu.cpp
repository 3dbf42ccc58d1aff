#include "snug/extra/bias_gelu.h"

#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "snug/core.h"
#include "src/core/computed_gradients.h"
#include "src/kernels/device_kernels.h"

namespace snug {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kTanh = "tanh";

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} [{}] on {}", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                     tensor.device().str());
}

void check(const at::Tensor& x, const at::Tensor& bias) {
  if (!x.defined() || !at::isFloatingType(x.scalar_type())) {
    throw ConfigError(
        fmt::format("bias_gelu: x is {}; it must be a floating tensor", x.defined() ? describe(x) : "undefined"));
  }
  if (!bias.defined()) {
    return;
  }
  if (x.dim() < 1 || bias.dim() != 1 || bias.size(0) != x.size(-1)) {
    throw ConfigError(fmt::format("bias_gelu: x is {} and the bias {}; they must be [..., columns] and [columns]",
                                  describe(x), describe(bias)));
  }
  if (bias.scalar_type() != x.scalar_type() || bias.device() != x.device()) {
    throw ConfigError(fmt::format("bias_gelu: x is {} and the bias {}; they must have one dtype and one device",
                                  describe(x), describe(bias)));
  }
}

at::Tensor sum_of(const at::Tensor& x, const at::Tensor& bias) { return bias.defined() ? at::add(x, bias) : x; }

at::Tensor forward_of(const at::Tensor& x, const at::Tensor& bias) {
  if (kernels::detail::has_bias_gelu_kernel(x)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::AutoGradMode in_graph(true);  // a checkpointed region makes values of the graph again
    return kernels::detail::device_bias_gelu(x, bias);
  }
  at::Tensor z = sum_of(x, bias);
  return bias.defined() ? at::gelu_(z, kTanh) : at::gelu(z, kTanh);  // a sum is ours to overwrite
}

at::Tensor backward_of(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& bias) {
  if (at::GradMode::is_enabled()) {  // this backward will be differentiated, as ATen's operators can
    return at::gelu_backward(grad, sum_of(x, bias), kTanh);
  }
  if (kernels::detail::has_bias_gelu_kernel(x)) {
    return kernels::detail::device_bias_gelu_backward(grad, x, bias);
  }
  at::Tensor z = sum_of(x, bias);
  return bias.defined() ? at::gelu_backward_out(z, grad, z, kTanh) : at::gelu_backward(grad, z, kTanh);
}

struct BiasGelu : torch::autograd::Function<BiasGelu> {
  // Function takes an undefined tensor only as an empty optional.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& given) {
    const at::Tensor bias = given.value_or(at::Tensor());
    context->save_for_backward({x, bias});
    return forward_of(x, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = detail::saved_for_computing(context);
    const at::Tensor& x = saved[0];
    const at::Tensor& bias = saved[1];
    const at::Tensor grad_x = backward_of(grads[0], x, bias);
    if (!bias.defined() || !context->needs_input_grad(1)) {
      return {grad_x, at::Tensor()};
    }
    return {grad_x, grad_x.sum_to_size(bias.sizes())};
  }
};

}  // namespace

at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias) {
  at::Tensor b = bias;
  if (x.defined() && b.defined() && at::autocast::is_autocast_enabled(x.device().type()) &&
      at::isFloatingType(b.scalar_type()) && at::isFloatingType(x.scalar_type())) {
    b = b.to(x.scalar_type());
  }
  check(x, b);
  return BiasGelu::apply(x, b.defined() ? std::optional(b) : std::nullopt);
}

}  // namespace snug
