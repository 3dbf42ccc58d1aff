#include "program/models/gpt.h"

// The model is GPT-2's (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"): LayerNorm in front
// of attention and MLP and once more at the end, learned position embeddings, GELU in the tanh form, logits by the
// token embedding's own matrix. The initialisation is also GPT-2's: weights normal with deviation 0.02, biases zero.
// The two projections of each block that add to the residual stream are scaled by 1/sqrt(2 layers), because so many
// independent terms add up in the stream. (As in nanoGPT the position embedding has 0.02, too; GPT-2's code has 0.01.)

#include <array>
#include <cmath>
#include <utility>

#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include "snug/core.h"
#include "src/core/nearest_name.h"

namespace snug {
namespace {

using torch::Tensor;

constexpr double kDeviation = 0.02;

struct Configuration {
  std::string_view name;
  GptOptions options;
};

const std::array<Configuration, 4>& configurations() {
  static const std::array<Configuration, 4> all{{
      {"gpt-tiny", {.context = 128, .layers = 4, .heads = 4, .width = 128}},
      {"gpt-small", {.context = 256, .layers = 12, .heads = 8, .width = 256}},
      {"gpt-medium", {.context = 256, .layers = 12, .heads = 8, .width = 512}},
      {"gpt-base", {.context = 1024, .layers = 12, .heads = 12, .width = 768}},
  }};
  return all;
}

void check(const GptOptions& options) {
  const std::array<std::pair<const char*, int64_t>, 6> counts{{{"vocab", options.vocab},
                                                               {"context", options.context},
                                                               {"layers", options.layers},
                                                               {"heads", options.heads},
                                                               {"width", options.width},
                                                               {"mlp_ratio", options.mlp_ratio}}};
  for (const auto& [name, value] : counts) {
    if (value < 1) {
      throw ConfigError(fmt::format("Gpt: {} is {}; give at least 1", name, value));
    }
  }
  if (options.width % options.heads != 0) {
    throw ConfigError(
        fmt::format("Gpt: {} heads do not divide a width of {}; give a multiple", options.heads, options.width));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    throw ConfigError(fmt::format("Gpt: dropout is {}; give one from 0 to below 1", options.dropout));
  }
}

torch::nn::LayerNorm layer_norm(const GptOptions& options) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}));
}

}  // namespace

GptOptions gpt_configuration(std::string_view name) {
  for (const Configuration& configuration : configurations()) {
    if (configuration.name == name) {
      return configuration.options;
    }
  }
  const auto known = gpt_configuration_names();
  throw ConfigError(fmt::format("gpt_configuration: there is no model '{}'; did you mean '{}'? Known are {}", name,
                                nearest_name(name, known), fmt::join(known, ", ")));
}

std::vector<std::string> gpt_configuration_names() {
  std::vector<std::string> names;
  for (const Configuration& configuration : configurations()) {
    names.emplace_back(configuration.name);
  }
  return names;
}

GptAttentionImpl::GptAttentionImpl(const GptOptions& options)
    : qkv(register_module("qkv", torch::nn::Linear(options.width, 3 * options.width))),
      projection(register_module("projection", torch::nn::Linear(options.width, options.width))),
      heads_(options.heads),
      dropout_(options.dropout) {}

Tensor GptAttentionImpl::forward(const Tensor& x) {
  const int64_t batch = x.size(0);
  const int64_t time = x.size(1);
  const int64_t width = x.size(2);
  // [B, T, 3 width] -> three times [B, heads, T, width / heads], as views.
  const auto parts = qkv->forward(x).view({batch, time, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const Tensor mixed =
      at::scaled_dot_product_attention(parts.select(0, 0), parts.select(0, 1), parts.select(0, 2), /*attn_mask=*/{},
                                       is_training() ? dropout_ : 0.0, /*is_causal=*/true);
  return projection->forward(mixed.transpose(1, 2).reshape({batch, time, width}));
}

GptMlpImpl::GptMlpImpl(const GptOptions& options)
    : up(register_module("up", torch::nn::Linear(options.width, options.mlp_ratio * options.width))),
      down(register_module("down", torch::nn::Linear(options.mlp_ratio * options.width, options.width))) {}

Tensor GptMlpImpl::forward(const Tensor& x) { return down->forward(at::gelu(up->forward(x), "tanh")); }

GptBlockImpl::GptBlockImpl(const GptOptions& options)
    : attention_norm(register_module("attention_norm", layer_norm(options))),
      attention(register_module("attention", GptAttention(options))),
      mlp_norm(register_module("mlp_norm", layer_norm(options))),
      mlp(register_module("mlp", GptMlp(options))),
      dropout(register_module("dropout", torch::nn::Dropout(options.dropout))) {}

Tensor GptBlockImpl::forward(Tensor x) {
  x = x + dropout->forward(attention->forward(attention_norm->forward(x)));
  return x + dropout->forward(mlp->forward(mlp_norm->forward(x)));
}

GptImpl::GptImpl(GptOptions with) : options(with) {
  check(options);
  token_embedding = register_module("token_embedding", torch::nn::Embedding(options.vocab, options.width));
  position_embedding = register_module("position_embedding", torch::nn::Embedding(options.context, options.width));
  dropout = register_module("dropout", torch::nn::Dropout(options.dropout));
  const auto list = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.layers; ++i) {
    blocks.emplace_back(options);
    list->push_back(blocks.back());
  }
  norm = register_module("norm", layer_norm(options));
  initialise();
}

void GptImpl::initialise() {
  const double on_residual = kDeviation / std::sqrt(2.0 * static_cast<double>(options.layers));
  for (const auto& item : named_parameters()) {
    const std::string& name = item.key();
    if (name.ends_with("norm.weight")) {
      torch::nn::init::ones_(item.value());
    } else if (name.ends_with("bias")) {
      torch::nn::init::zeros_(item.value());
    } else {
      const bool residual = name.ends_with("projection.weight") || name.ends_with("down.weight");
      torch::nn::init::normal_(item.value(), 0.0, residual ? on_residual : kDeviation);
    }
  }
}

void GptImpl::set_block_runner(BlockRunner runner) { run_block_ = std::move(runner); }

Tensor GptImpl::forward(const Tensor& tokens) { return at::linear(hidden(tokens), head_weight()); }

Tensor GptImpl::hidden(const Tensor& tokens) {
  if (tokens.dim() != 2 || tokens.scalar_type() != torch::kLong) {
    throw ConfigError(fmt::format("Gpt.forward: tokens are {} [{}]; give int64 [batch, time]",
                                  toString(tokens.scalar_type()), fmt::join(tokens.sizes(), ", ")));
  }
  const int64_t time = tokens.size(1);
  if (time < 1 || time > options.context) {
    throw ConfigError(
        fmt::format("Gpt.forward: {} tokens in a row, the model's context is {}; cut the text, or make the "
                    "model with a longer context",
                    time, options.context));
  }
  Tensor x = token_embedding->forward(tokens) + position_embedding->weight.narrow(0, 0, time);
  x = dropout->forward(x);
  for (GptBlock& block : blocks) {
    // By value: the runner may call `run` again after this function has returned.
    const auto run = [block = block.ptr()](Tensor h) { return block->forward(std::move(h)); };
    x = run_block_ ? run_block_(run, std::move(x)) : run(std::move(x));
  }
  return norm->forward(x);
}

}  // namespace snug
