// A small GPT learns to add: before.cpp with nine lines changed, so that it fits into 256 MiB of tensors and runs
// faster. The Stepper tries the step in its first call and chooses a micro-batch, and what to compute again, such that
// it fits.
//
//   after [STEPS]

#include <chrono>
#include <cmath>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <snug/snug.h>

using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kContext = 256, kBatch = 24, kWidth = 128, kHeads = 8, kLayers = 6, kVocabulary = 128;

// Attention as the formula has it: every pair of positions gets a score.
struct AttentionImpl : nn::Module {
  AttentionImpl() {
    mask = register_buffer("mask", torch::ones({kContext, kContext}, torch::kBool).triu(1));
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    projection = register_module("projection", nn::Linear(kWidth, kWidth));
  }

  Tensor forward(const Tensor& x) {
    const int64_t batch = x.size(0), time = x.size(1), depth = kWidth / kHeads;
    const auto parts = qkv->forward(x).view({batch, time, 3, kHeads, depth}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(depth));
    const Tensor seen = mask.slice(0, 0, time).slice(1, 0, time);
    const Tensor weights = torch::softmax(scores.masked_fill(seen, -std::numeric_limits<float>::infinity()), -1);
    return projection->forward(torch::matmul(weights, parts[2]).transpose(1, 2).reshape({batch, time, kWidth}));
  }

  Tensor mask;
  nn::Linear qkv = nullptr, projection = nullptr;
};
TORCH_MODULE(Attention);

struct BlockImpl : nn::Module {
  BlockImpl() {
    attention_norm = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", Attention());
    mlp_norm = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", nn::Linear(4 * kWidth, kWidth));
  }

  Tensor forward(Tensor x) {
    x = x + attention->forward(attention_norm->forward(x));
    return x + down->forward(torch::gelu(up->forward(mlp_norm->forward(x))));
  }

  nn::LayerNorm attention_norm = nullptr, mlp_norm = nullptr;
  Attention attention = nullptr;
  nn::Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct ModelImpl : nn::Module {
  ModelImpl() {
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", nn::Embedding(kContext, kWidth));
    for (int64_t i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    head = register_module("head", nn::Linear(kWidth, kVocabulary));
  }

  Tensor forward(const Tensor& x) {
    Tensor h = tokens->forward(x) + positions->forward(torch::arange(x.size(1)));
    for (auto& block : blocks) {
      h = block->forward(h);
    }
    return head->forward(norm->forward(h));
  }

  nn::Embedding tokens = nullptr, positions = nullptr;
  std::vector<Block> blocks;
  nn::LayerNorm norm = nullptr;
  nn::Linear head = nullptr;
};
TORCH_MODULE(Model);

// Lines such as "47+85=132" one after the other, cut into rows: [kBatch, kContext + 1].
Tensor additions(std::mt19937& random) {
  std::string text;
  while (text.size() < static_cast<size_t>(kBatch * (kContext + 1))) {
    const auto a = random() % 100, b = random() % 100;
    text += std::to_string(a) + "+" + std::to_string(b) + "=" + std::to_string(a + b) + "\n";
  }
  std::vector<int64_t> letters(text.begin(), text.end());
  letters.resize(kBatch * (kContext + 1));
  return torch::tensor(letters).view({kBatch, kContext + 1});
}

// What the model says to `question`, a letter at a time.
std::string answer(Model& model, const std::string& question) {
  const torch::NoGradGuard no_grad;
  std::string text = question;
  while (text.size() < question.size() + 5 && text.back() != '\n') {
    const Tensor input = torch::tensor(std::vector<int64_t>(text.begin(), text.end())).unsqueeze(0);
    text += static_cast<char>(model->forward(input)[0][-1].argmax().item<int64_t>());
  }
  return text.substr(0, text.find('\n'));
}

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::stoi(argv[1]) : 300;
  torch::manual_seed(1);
  std::mt19937 random(1);
  Model model;
  snug::AdamW optimizer(model->parameters(), {.lr = 2e-3});
  snug::Stepper stepper(model, optimizer, {.clip_norm = 1.0, .budget = {.memory = snug::Bytes::parse("256MiB")}});

  const auto start = std::chrono::steady_clock::now();
  for (int step = 1; step <= steps; ++step) {
    const Tensor rows = additions(random);
    const Tensor x = rows.slice(1, 0, kContext), y = rows.slice(1, 1);
    const auto result = stepper.step({x, y}, [&](const snug::Batch& micro) {
      const Tensor logits = model->forward(micro[0]);
      return snug::Loss::mean(nn::functional::cross_entropy(logits.flatten(0, 1), micro[1].flatten()),
                              micro[1].numel());
    });
    if (step % 10 == 0 || step == steps) {
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      std::cout << "step " << step << "  loss " << result.loss() << "  "
                << static_cast<double>(step * kBatch * kContext) / seconds.count() << " tokens/s" << std::endl;
    }
  }
  std::cout << answer(model, "\n12+34=") << answer(model, "\n56+78=") << "\n";
}
