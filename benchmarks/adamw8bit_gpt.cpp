// Whether 8-bit moments cost loss: a small GPT (2 blocks, d = 128, context 64) on text, 1,000 steps of batch 16, with
// AdamW and with AdamW8bit, each from three seeds. Prints the held-out loss of each; the spread over seeds is the noise
// to compare the difference with.
//
// usage: adamw8bit_gpt TEXT... [--steps N]

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "snug/data/sampler.h"
#include "snug/data/text_corpus.h"
#include "snug/models/gpt.h"
#include "snug/optim/adamw8bit.h"
#include "snug/optim/schedule.h"
#include "snug/step/stepper.h"

namespace {

constexpr int64_t kContext = 64, kBatch = 16;

snug::Loss loss_of(snug::Gpt& model, const torch::Tensor& input, const torch::Tensor& target) {
  const auto logits = model->forward(input);
  return snug::Loss::sum(
      torch::nn::functional::cross_entropy(logits.flatten(0, 1), target.flatten(),
                                           torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
      target.numel());
}

template <class Optimizer, class Options>
double held_out_loss(const snug::TextCorpus& corpus, uint64_t seed, int64_t steps, Options options) {
  torch::manual_seed(seed);
  snug::Gpt model(snug::GptOptions{.context = kContext, .layers = 2, .heads = 4, .width = 128});
  Optimizer optimizer(model->parameters(), options);
  snug::Stepper stepper(model, optimizer, {.clip_norm = 1.0});
  snug::Sampler sampler(corpus.number_of_windows(kContext, snug::Split::Train), seed);
  const snug::WarmupCosine schedule{.peak = 2e-3, .warmup_steps = steps / 20, .total_steps = steps, .floor = 2e-4};
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.param_groups()[0].options().set_lr(schedule.at(step));
    const auto [input, target] = corpus.windows(sampler.next(kBatch), kContext, snug::Split::Train);
    stepper.step({input, target}, [&](const snug::Batch& micro) { return loss_of(model, micro[0], micro[1]); });
  }
  const torch::NoGradGuard no_grad;
  const auto starts = corpus.evenly_spread(256, kContext, snug::Split::Validation);
  const auto [input, target] = corpus.windows(starts, kContext, snug::Split::Validation);
  return loss_of(model, input, target).value().item<double>() / static_cast<double>(target.numel());
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> texts;
  int64_t steps = 1000;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--steps" && i + 1 < argc) {
      steps = std::atoll(argv[++i]);
    } else {
      texts.emplace_back(argv[i]);
    }
  }
  if (texts.empty() || steps < 20) {
    std::cerr << "usage: adamw8bit_gpt TEXT... [--steps N], with at least 20 steps\n";
    return 2;
  }
  const auto corpus = snug::TextCorpus::load(texts);
  std::cout << "| seed | AdamW | AdamW8bit | difference |\n|---|---|---|---|\n";
  double sum = 0, squares = 0, difference = 0;
  constexpr int kSeeds = 3;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const double full = held_out_loss<snug::AdamW>(corpus, seed, steps, snug::AdamWOptions{.weight_decay = 0.1});
    const double quantized =
        held_out_loss<snug::AdamW8bit>(corpus, seed, steps, snug::AdamW8bitOptions{.weight_decay = 0.1});
    sum += full;
    squares += full * full;
    difference += (quantized - full) / kSeeds;
    std::cout << fmt::format("| {} | {:.4f} | {:.4f} | {:+.4f} |", seed, full, quantized, quantized - full)
              << std::endl;
  }
  const double spread = std::sqrt(std::max(0.0, (squares - sum * sum / kSeeds) / (kSeeds - 1)));
  std::cout << fmt::format("mean difference {:+.4f}; AdamW's own standard deviation over seeds {:.4f}\n", difference,
                           spread);
}
