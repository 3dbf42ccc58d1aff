// Whether an optimizer's rounding costs loss: a small GPT (2 blocks, d = 128, context 64) on text, 1,000 steps of batch
// 16, with AdamW in FP32 and with the optimizers that keep less, each from the same seeds. Prints the held-out loss at
// ten points of the way: AdamW's mean and standard deviation over seeds, which is the noise to compare with, and of the
// others the mean difference from it with the deviation of that. "BF16, masters" differs by the arithmetic in BF16;
// what the other two in BF16 differ from it is the optimizer's.
//
// usage: optimizer_losses TEXT... [--steps N] [--seeds N]

#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/datasets/text_corpus.h"
#include "program/models/gpt.h"
#include "snug/adamw.h"
#include "snug/sampler.h"
#include "snug/schedule.h"
#include "snug/stepper.h"

namespace {

constexpr int64_t kContext = 64, kBatch = 16;
constexpr int64_t kPoints = 10;
constexpr double kDecay = 0.1;

using Parameters = std::vector<torch::Tensor>;
using Curve = std::array<double, kPoints>;

struct Kind {
  const char* name;
  torch::ScalarType weights;
  std::function<std::unique_ptr<snug::FusedOptimizer>(const Parameters&)> make;
};

template <class Optimizer, class Options>
Kind kind(const char* name, torch::ScalarType weights, Options options) {
  return {name, weights, [options](const Parameters& p) { return std::make_unique<Optimizer>(p, options); }};
}

std::vector<Kind> kinds() {
  return {
      kind<snug::AdamW>("AdamW", torch::kFloat, snug::AdamWOptions{.weight_decay = kDecay}),
      kind<snug::AdamW8bit>("AdamW8bit", torch::kFloat, snug::AdamW8bitOptions{.weight_decay = kDecay}),
      kind<snug::AdamW>("BF16, masters", torch::kBFloat16,
                        snug::AdamWOptions{.weight_decay = kDecay, .master_weights = true}),
      kind<snug::AdamW8bit>("BF16, AdamW8bit", torch::kBFloat16,
                            snug::AdamW8bitOptions{.weight_decay = kDecay, .split_weights = true}),
  };
}

snug::Loss loss_of(snug::Gpt& model, const torch::Tensor& input, const torch::Tensor& target) {
  const auto logits = model->forward(input).to(torch::kFloat);
  return snug::Loss::sum(
      torch::nn::functional::cross_entropy(logits.flatten(0, 1), target.flatten(),
                                           torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
      target.numel());
}

double held_out_loss(snug::Gpt& model, const snug::TextCorpus& corpus) {
  const torch::NoGradGuard no_grad;
  const auto starts = corpus.evenly_spread(256, kContext, snug::Split::Validation);
  const auto [input, target] = corpus.windows(starts, kContext, snug::Split::Validation);
  return loss_of(model, input, target).value().item<double>() / static_cast<double>(target.numel());
}

Curve train(const snug::TextCorpus& corpus, const Kind& kind, uint64_t seed, int64_t steps) {
  torch::manual_seed(seed);
  snug::Gpt model(snug::GptOptions{.context = kContext, .layers = 2, .heads = 4, .width = 128});
  model->to(kind.weights);
  const auto optimizer = kind.make(model->parameters());
  snug::Stepper stepper(model, *optimizer, {.clip_norm = 1.0});
  snug::Sampler sampler(corpus.number_of_windows(kContext, snug::Split::Train), seed);
  const snug::WarmupCosine schedule{.peak = 2e-3, .warmup_steps = steps / 20, .total_steps = steps, .floor = 2e-4};
  Curve curve{};
  for (int64_t step = 0; step < steps; ++step) {
    optimizer->param_groups()[0].options().set_lr(schedule.at(step));
    const auto [input, target] = corpus.windows(sampler.next(kBatch), kContext, snug::Split::Train);
    stepper.step({input, target}, [&](const snug::Batch& micro) { return loss_of(model, micro[0], micro[1]); });
    if ((step + 1) % (steps / kPoints) == 0) {
      curve[static_cast<size_t>((step + 1) / (steps / kPoints) - 1)] = held_out_loss(model, corpus);
    }
  }
  return curve;
}

struct Spread {
  double mean, deviation;  // the latter of one value, not of the mean
};

Spread spread_of(const std::vector<Curve>& curves, size_t point, const std::vector<Curve>& less) {
  double sum = 0, squares = 0;
  const auto count = static_cast<double>(curves.size());
  for (size_t seed = 0; seed < curves.size(); ++seed) {
    const double x = curves[seed][point] - (less.empty() ? 0 : less[seed][point]);
    sum += x;
    squares += x * x;
  }
  const double variance = curves.size() < 2 ? 0 : (squares - sum * sum / count) / (count - 1);
  return {sum / count, std::sqrt(std::max(0.0, variance))};
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> texts;
  int64_t steps = 1000, seeds = 3;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if ((argument == "--steps" || argument == "--seeds") && i + 1 < argc) {
      (argument == "--steps" ? steps : seeds) = std::atoll(argv[++i]);
    } else {
      texts.emplace_back(argument);
    }
  }
  if (texts.empty() || steps < 20 || steps % kPoints != 0 || seeds < 1) {
    std::cerr << "usage: optimizer_losses TEXT... [--steps N] [--seeds N], with at least 20 steps, a multiple of 10\n";
    return 2;
  }
  const auto corpus = snug::TextCorpus::load(texts);
  std::vector<std::vector<Curve>> curves;
  for (const Kind& kind : kinds()) {
    auto& of_kind = curves.emplace_back();
    for (int64_t seed = 1; seed <= seeds; ++seed) {
      of_kind.push_back(train(corpus, kind, static_cast<uint64_t>(seed), steps));
      std::cerr << fmt::format("{}, seed {}: {:.4f}\n", kind.name, seed, of_kind.back().back());
    }
  }
  std::cout << fmt::format("Means over {} seeds.\n\n| step | AdamW | its deviation over seeds |", seeds);
  for (size_t k = 1; k < curves.size(); ++k) {
    std::cout << fmt::format(" {}, less AdamW |", kinds()[k].name);
  }
  std::cout << "\n|---|---|---|";
  for (size_t k = 1; k < curves.size(); ++k) {
    std::cout << "---|";
  }
  std::cout << "\n";
  for (size_t point = 0; point < kPoints; ++point) {
    const Spread base = spread_of(curves[0], point, {});
    std::cout << fmt::format("| {} | {:.4f} | {:.4f} |", steps / kPoints * static_cast<int64_t>(point + 1), base.mean,
                             base.deviation);
    for (size_t k = 1; k < curves.size(); ++k) {
      const Spread difference = spread_of(curves[k], point, curves[0]);
      std::cout << fmt::format(" {:+.4f} ± {:.4f} |", difference.mean, difference.deviation);
    }
    std::cout << "\n";
  }
}
