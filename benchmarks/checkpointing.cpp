// Checkpointing: what a region costs when there is next to nothing in it, and a GPT with every block in a region. See script/bench.

#include <memory>

#include <torch/torch.h>

#include "benchmarks/serve.h"
#include "snug/activations/checkpoint.h"
#include "snug/models/gpt.h"

namespace {

using torch::Tensor;

// Forward and backward of one sine of one number.
template <class Call>
auto tiny(Call call) {
  return [call]() -> std::function<void()> {
    const Tensor x = torch::ones({1}, torch::requires_grad());
    return [=] { call(x).backward(); };
  };
}

// 12 blocks, d = 256, 4 x 256 tokens, FP32: forward and backward. In the order of benchmarks/peers/checkpointing.py.
auto gpt(bool every_block) {
  return [every_block]() -> std::function<void()> {
    torch::manual_seed(1);
    snug::Gpt model(snug::GptOptions{.vocab = 256, .context = 256, .layers = 12, .heads = 8, .width = 256});
    if (every_block) {
      model->set_block_runner([](const auto& block, Tensor x) { return snug::checkpoint(block, std::move(x)); });
    }
    const Tensor tokens = torch::randint(256, {4, 256});
    return [=]() mutable {
      model->zero_grad();
      const Tensor logits = model->forward(tokens);
      torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward();
    };
  };
}

}  // namespace

int main() {
  return snug::benchmarks::serve({
      {"tiny_plain", tiny([](const Tensor& x) { return x.sin(); })},
      {"tiny_checkpoint",
       tiny([](const Tensor& x) { return snug::checkpoint([](const Tensor& y) { return y.sin(); }, x); })},
      {"gpt_plain", gpt(false)},
      {"gpt_every_block", gpt(true)},
  });
}
