#include "src/precision/fp32_reductions.h"

#include <mutex>
#include <sstream>
#include <string>
#include <string_view>

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

// LibTorch's lists of operators for CPU autocast leave these operators in the type of the inputs, so a softmax after a
// BF16 matrix product is computed and rounded in BF16. Here each operator gets a kernel for CPU autocast: one boxed
// function for all. The function casts 16-bit inputs to FP32 if the switch is on, and passes the inputs on unchanged if
// the switch is off. Tried on LibTorch 2.11.0 and 2.13.0. If LibTorch itself has a CPU autocast kernel for an operator,
// LibTorch's kernel is used.

namespace snug::detail {
namespace {

thread_local bool is_on = false;

// CUDA's lists (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and norm in ATen/autocast_mode.h), and means and batch
// normalisation, because CUDA's own kernels compute both in FP32.
constexpr std::string_view kOperators =
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm "
    "batch_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim "
    "linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
    "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp sum sum.dim_IntList mean mean.dim prod prod.dim_int cumsum cumprod softmax.int "
    "log_softmax.int upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa";

bool is_low(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         (value.toTensor().scalar_type() == at::kHalf || value.toTensor().scalar_type() == at::kBFloat16);
}

// A type that the caller names is the caller's choice. 16-bit running statistics are written to, so the statistics
// cannot be cast.
bool leaves_as_it_is(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = schema.arguments()[i].name();
    if ((name == "dtype" && !arguments[i].isNone()) ||
        ((name == "running_mean" || name == "running_var") && is_low(arguments[i]))) {
      return true;
    }
  }
  return false;
}

void run_in_fp32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::DispatchKey::AutocastCPU);
  const size_t count = op.schema().arguments().size();
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + stack->size() - count, count);
  if (is_on && !leaves_as_it_is(op.schema(), arguments)) {
    for (size_t i = stack->size() - count; i < stack->size(); ++i) {
      if (is_low((*stack)[i])) {
        (*stack)[i] = at::autocast::cached_cast(at::kFloat, (*stack)[i].toTensor(), c10::DeviceType::CPU);
      }
    }
  }
  op.callBoxed(stack);
}

void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastCPU, __FILE__, __LINE__);
  std::istringstream names{std::string(kOperators)};
  for (std::string name; names >> name;) {
    const size_t dot = name.find('.');
    const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + name.substr(0, dot), overload});
    if (op && !op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) {
      library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_in_fp32>());
    }
  }
}

}  // namespace

bool fp32_reductions() { return is_on; }

void set_fp32_reductions(bool on) {
  if (on) {
    static std::once_flag once;
    std::call_once(once, register_kernels);
  }
  is_on = on;
}

}  // namespace snug::detail
