#pragma once
// GPT-2 (Radford et al. 2019) of single operators: layer norms, attention and tanh-GELU are written out.

#include <cmath>
#include <numbers>

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

struct Gpt2Options {
  int64_t vocab = 512, context = 128, layers = 5, heads = 6, width = 192, batch = 4;
  double dropout = 0.1;
};

class LayerNormByHandImpl : public torch::nn::Module {
 public:
  explicit LayerNormByHandImpl(int64_t width)
      : gain(register_parameter("gain", torch::ones({width}))),
        bias(register_parameter("bias", torch::zeros({width}))) {}

  Tensor forward(const Tensor& x) const {
    const Tensor centred = x - x.mean(-1, /*keepdim=*/true);
    const Tensor variance = centred.square().mean(-1, /*keepdim=*/true);
    return centred / torch::sqrt(variance + 1e-5) * gain + bias;
  }

  Tensor gain, bias;
};
TORCH_MODULE(LayerNormByHand);

class LinearByHandImpl : public torch::nn::Module {
 public:
  LinearByHandImpl(int64_t in, int64_t out)
      : weight(register_parameter("weight", torch::randn({in, out}) * 0.02)),
        bias(register_parameter("bias", torch::zeros({out}))) {}

  Tensor forward(const Tensor& x) const { return torch::matmul(x, weight) + bias; }

  Tensor weight, bias;
};
TORCH_MODULE(LinearByHand);

inline Tensor gelu_by_hand(const Tensor& x) {
  const double scale = std::sqrt(2 / std::numbers::pi);
  return 0.5 * x * (1 + torch::tanh(scale * (x + 0.044715 * torch::pow(x, 3))));
}

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  explicit Gpt2BlockImpl(const Gpt2Options& options)
      : options_(options),
        norm1_(register_module("norm1", LayerNormByHand(options.width))),
        norm2_(register_module("norm2", LayerNormByHand(options.width))),
        qkv_(register_module("qkv", LinearByHand(options.width, 3 * options.width))),
        projection_(register_module("projection", LinearByHand(options.width, options.width))),
        up_(register_module("up", LinearByHand(options.width, 4 * options.width))),
        down_(register_module("down", LinearByHand(4 * options.width, options.width))) {}

  Tensor forward(Tensor x) {
    x = x + dropout(attention(norm1_->forward(x)));
    return x + dropout(down_->forward(gelu_by_hand(up_->forward(norm2_->forward(x)))));
  }

 private:
  Tensor attention(const Tensor& x) {
    const int64_t items = x.size(0), length = x.size(1), head_width = options_.width / options_.heads;
    const auto heads_first = [&](const Tensor& t) {
      return t.view({items, length, options_.heads, head_width}).transpose(1, 2);
    };
    const std::vector<Tensor> qkv = qkv_->forward(x).chunk(3, -1);
    const Tensor future = torch::ones({length, length}, torch::kBool).triu(1);
    Tensor scores = torch::matmul(heads_first(qkv[0]), heads_first(qkv[1]).transpose(-2, -1));
    scores = (scores / std::sqrt(static_cast<double>(head_width))).masked_fill(future, -1e9);
    const Tensor weights = dropout(torch::softmax(scores, -1));
    const Tensor heads = torch::matmul(weights, heads_first(qkv[2]));
    return projection_->forward(heads.transpose(1, 2).reshape({items, length, options_.width}));
  }

  Tensor dropout(const Tensor& x) const { return torch::dropout(x, options_.dropout, is_training()); }

  Gpt2Options options_;
  LayerNormByHand norm1_, norm2_;
  LinearByHand qkv_, projection_, up_, down_;
};
TORCH_MODULE(Gpt2Block);

class Gpt2Impl : public torch::nn::Module {
 public:
  explicit Gpt2Impl(const Gpt2Options& options)
      : words_(register_module("words", torch::nn::Embedding(options.vocab, options.width))),
        places_(register_module("places", torch::nn::Embedding(options.context, options.width))),
        norm_(register_module("norm", LayerNormByHand(options.width))) {
    for (int64_t i = 0; i < options.layers; ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i), Gpt2Block(options)));
    }
  }

  Tensor loss(const Tensor& tokens, const Run& run) {
    const Tensor in = tokens.slice(1, 0, -1), out = tokens.slice(1, 1);
    Parts parts;
    for (const Gpt2Block& block : blocks_) {
      parts.emplace_back([block = block.ptr()](const State& x) { return State{block->forward(x[0])}; });
    }
    const Tensor h = run(parts, {words_->forward(in) + places_->forward(torch::arange(in.size(1)))})[0];
    const Tensor logits = torch::matmul(norm_->forward(h), words_->weight.t());
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), out.flatten());
  }

 private:
  torch::nn::Embedding words_, places_;
  LayerNormByHand norm_;
  std::vector<Gpt2Block> blocks_;
};
TORCH_MODULE(Gpt2);

inline Entry make_gpt2(const Gpt2Options& options = {}) {
  torch::manual_seed(1);
  Gpt2 model(options);
  const Tensor tokens = torch::randint(options.vocab, {options.batch, options.context + 1});
  return {"gpt2", model.ptr(), {tokens}, [model](const Batch& batch, const Run& run) mutable {
            return model->loss(batch[0], run);
          }};
}

/// For tests.
inline Entry make_tiny_gpt2() {
  Entry entry = make_gpt2({.vocab = 64, .context = 32, .layers = 2, .heads = 2, .width = 32, .batch = 2});
  entry.name = "tiny_gpt2";
  return entry;
}

}  // namespace snug::zoo
