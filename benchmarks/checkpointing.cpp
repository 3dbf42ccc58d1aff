// Checkpointing: what a region costs when there is next to nothing in it, and a GPT with every block in a region, without and with the
// results of matrix products kept. See script/bench. Of the GPT it tells on standard error the bytes that are held for backward.

#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include <torch/torch.h>

#include "benchmarks/serve.h"
#include "snug/activations/checkpoint.h"
#include "snug/memory/meter.h"
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
auto gpt(const std::string& name, const std::optional<snug::CheckpointOptions>& each_block) {
  return [=]() -> std::function<void()> {
    torch::manual_seed(1);
    snug::Gpt model(snug::GptOptions{.vocab = 256, .context = 256, .layers = 12, .heads = 8, .width = 256});
    if (each_block) {
      model->set_block_runner(
          [=](const auto& block, Tensor x) { return snug::checkpoint(*each_block, block, std::move(x)); });
    }
    const Tensor tokens = torch::randint(256, {4, 256});
    const std::function<Tensor()> loss = [=]() mutable {
      return torch::nn::functional::cross_entropy(model->forward(tokens).flatten(0, 1), tokens.flatten());
    };
    {
      const snug::MemoryMeter meter;
      const Tensor held = loss();
      std::fprintf(stderr, "%s: snug holds %.1f MiB for backward\n", name.c_str(),
                   static_cast<double>(meter.report().live_bytes) / (1 << 20));
    }
    return [=]() mutable {
      model->zero_grad();
      loss().backward();
    };
  };
}

}  // namespace

int main() {
  return snug::benchmarks::serve({
      {"tiny_plain", tiny([](const Tensor& x) { return x.sin(); })},
      {"tiny_checkpoint",
       tiny([](const Tensor& x) { return snug::checkpoint([](const Tensor& y) { return y.sin(); }, x); })},
      {"gpt_plain", gpt("gpt_plain", std::nullopt)},
      {"gpt_every_block", gpt("gpt_every_block", snug::CheckpointOptions{})},
      {"gpt_save_matmuls", gpt("gpt_save_matmuls", snug::CheckpointOptions{.policy = snug::save_matmuls})},
  });
}
