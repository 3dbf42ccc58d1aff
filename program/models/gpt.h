#pragma once
// Gpt: a decoder-only transformer of the GPT-2 family (pre-norm, learned positions, head tied to the token embedding).
// A Gpt knows nothing of memory techniques: memory techniques come in as a block runner.
//
//   snug::Gpt model(snug::gpt_configuration("gpt-tiny"));
//   model->set_block_runner([](const auto& block, auto x) { return snug::checkpoint(block, x); });
//   auto logits = model->forward(tokens);     // int64 [batch, time] -> [batch, time, vocab]

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "program/models/block_runner.h"

namespace snug {

struct GptOptions {
  int64_t vocab = 256;    ///< number of tokens; 256 is every byte
  int64_t context = 128;  ///< the most tokens that forward takes; attention's cost grows with the context
  int64_t layers = 4;
  int64_t heads = 4;  ///< divides width; 32 to 64 numbers a head are usual
  int64_t width = 128;
  int64_t mlp_ratio = 4;  ///< the MLP's hidden layer is so many times `width`
  double dropout = 0;     ///< on attention weights, branches and embedding; 0 while data is plenty
};

/// "gpt-tiny" (0.8 M parameters), "gpt-small" (9.6 M), "gpt-medium" (38 M) or "gpt-base" (12 x 768 and a context of
/// 1024, like GPT-2 small, on bytes: 86 M). Throws ConfigError with the nearest name for any other name.
GptOptions gpt_configuration(std::string_view name);

/// All names that gpt_configuration knows, smallest first.
std::vector<std::string> gpt_configuration_names();

/// Causal multi-head self-attention: [B, T, width] -> [B, T, width].
class GptAttentionImpl : public torch::nn::Module {
 public:
  explicit GptAttentionImpl(const GptOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear qkv{nullptr};         // width -> query, key and value, each width
  torch::nn::Linear projection{nullptr};  // back onto the residual stream

 private:
  int64_t heads_;
  double dropout_;
};
TORCH_MODULE(GptAttention);

/// width -> mlp_ratio * width, GELU (tanh form), and back: [B, T, width] -> [B, T, width].
class GptMlpImpl : public torch::nn::Module {
 public:
  explicit GptMlpImpl(const GptOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear up{nullptr};
  torch::nn::Linear down{nullptr};
};
TORCH_MODULE(GptMlp);

/// x + attention(norm(x)), then the same with the MLP: [B, T, width] -> [B, T, width].
class GptBlockImpl : public torch::nn::Module {
 public:
  explicit GptBlockImpl(const GptOptions& options);
  torch::Tensor forward(torch::Tensor x);

  torch::nn::LayerNorm attention_norm{nullptr};
  GptAttention attention{nullptr};
  torch::nn::LayerNorm mlp_norm{nullptr};
  GptMlp mlp{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(GptBlock);

/// Parameters: token_embedding.weight, position_embedding.weight, norm.{weight, bias} and
/// blocks.I.{attention_norm, attention.qkv, attention.projection, mlp_norm, mlp.up,
/// mlp.down}.{weight, bias}. Initialised as GPT-2 is, from torch's default generator: the same
/// seed gives the same weights.
class GptImpl : public torch::nn::Module {
 public:
  /// Throws ConfigError for options that cannot work.
  explicit GptImpl(GptOptions options = {});

  /// int64 [B, T], T <= context -> logits [B, T, vocab]. Throws ConfigError for another shape or
  /// dtype.
  torch::Tensor forward(const torch::Tensor& tokens);

  /// The same up to the head: [B, T, width]. For losses that never hold all logits at once, with
  /// head_weight() [vocab, width].
  torch::Tensor hidden(const torch::Tensor& tokens);
  const torch::Tensor& head_weight() const { return token_embedding->weight; }

  /// From now on every block is called through `runner`; after an empty `runner` the blocks are called directly again.
  void set_block_runner(BlockRunner runner);

  const GptOptions options;
  torch::nn::Embedding token_embedding{nullptr};
  torch::nn::Embedding position_embedding{nullptr};
  torch::nn::Dropout dropout{nullptr};
  std::vector<GptBlock> blocks;
  torch::nn::LayerNorm norm{nullptr};

 private:
  void initialise();

  BlockRunner run_block_;
};
TORCH_MODULE(Gpt);

}  // namespace snug
