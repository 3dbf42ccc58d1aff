#include <algorithm>
#include <array>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include "snug/checkpoint.h"
#include "snug/core.h"

namespace snug {
namespace {

template <size_t N>
Keep save_if_among(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end() ? Keep::Save : Keep::Recompute;
}

constexpr std::array<std::string_view, 17> kMatmuls{"aten::mm",
                                                    "aten::addmm",
                                                    "aten::bmm",
                                                    "aten::baddbmm",
                                                    "aten::addbmm",
                                                    "aten::mv",
                                                    "aten::addmv",
                                                    "aten::dot",
                                                    "aten::_addmm_activation",
                                                    "aten::linear",
                                                    "aten::convolution",
                                                    "aten::_convolution",
                                                    "aten::_scaled_mm",
                                                    "aten::matmul",
                                                    "aten::convolution_overrideable",
                                                    "aten::addr",
                                                    "aten::cudnn_convolution"};

constexpr std::array<std::string_view, 7> kAttention{"aten::_scaled_dot_product_flash_attention",
                                                     "aten::_scaled_dot_product_flash_attention_for_cpu",
                                                     "aten::_scaled_dot_product_efficient_attention",
                                                     "aten::_scaled_dot_product_cudnn_attention",
                                                     "aten::_scaled_dot_product_attention_math",
                                                     "aten::_flash_attention_forward",
                                                     "aten::_efficient_attention_forward"};

// Further operators that are neither elementwise nor cheap.
constexpr std::array<std::string_view, 14> kOther{"aten::mkldnn_rnn_layer",
                                                  "aten::_cudnn_rnn",
                                                  "aten::_thnn_fused_lstm_cell",
                                                  "aten::_thnn_fused_gru_cell",
                                                  "aten::embedding",
                                                  "aten::_embedding_bag",
                                                  "aten::sort",
                                                  "aten::topk",
                                                  "aten::index",
                                                  "aten::cumsum",
                                                  "aten::grid_sampler_2d",
                                                  "aten::upsample_bilinear2d",
                                                  "aten::max_pool2d_with_indices",
                                                  "aten::_fft_c2c"};

}  // namespace

Keep save_matmuls(std::string_view operator_name) { return save_if_among(kMatmuls, operator_name); }

Keep save_attention(std::string_view operator_name) { return save_if_among(kAttention, operator_name); }

Keep recompute_pointwise(std::string_view operator_name) {
  const bool saves = save_matmuls(operator_name) == Keep::Save || save_attention(operator_name) == Keep::Save ||
                     save_if_among(kOther, operator_name) == Keep::Save;
  return saves ? Keep::Save : Keep::Recompute;
}

CheckpointPolicy policy_of(std::map<std::string, Keep> names) {
  const auto known = c10::Dispatcher::singleton().getAllOpNames();
  for (const auto& [name, keep] : names) {
    if (std::none_of(known.begin(), known.end(),
                     [&name = name](const c10::OperatorName& op) { return op.name == name; })) {
      throw ConfigError(
          fmt::format("policy_of: there is no operator '{}'; names are like aten::mm, without overload", name));
    }
  }
  return [names = std::move(names)](std::string_view operator_name) {
    const auto found = names.find(std::string(operator_name));
    return found == names.end() ? Keep::Recompute : found->second;
  };
}

}  // namespace snug
