// The largest GPT (12 blocks, 8 sequences of 256 tokens a step) that trains in a number of bytes of tensors, by way of
// training, and how fast it does. Each way is searched by widths in steps of 32, with two micro-batches of one sequence
// where it splits: more of them take no more memory. The last row is of a width that is given, since a model in files
// is limited by the disk and by patience.
//
//   benchmark_largest_gpt DIRECTORY [LIMIT [WIDTH-IN-FILES]]      (1GiB, 1696: 415 million parameters)

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/compare/measure.h"
#include "program/models/gpt.h"
#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/stepper.h"

namespace {

using torch::Tensor;

constexpr int64_t kLayers = 12, kContext = 256, kSequences = 8, kWidthUnit = 32;

struct Way {
  const char* name;
  bool is_torch = false;  // torch::optim::AdamW, the batch at once, no Stepper
  bool plans = false;     // else micro-batches of one sequence, and everything kept
  bool state_in_file = false;
  bool all_in_files = false;
  bool has_split_weights = false;  // BF16 weights
};

constexpr Way kWays[] = {
    {.name = "plain LibTorch", .is_torch = true},
    {.name = "micro-batches of 1"},
    {.name = "plan", .plans = true},
    {.name = "plan, AdamW8bit in BF16 (rounds)", .plans = true, .has_split_weights = true},
    {.name = "plan, state in a file", .plans = true, .state_in_file = true},
    {.name = "plan, weights, gradients and state in files", .plans = true, .all_in_files = true},
};

class Training {
 public:
  Training(const Way& way, int64_t width, snug::Bytes limit, const std::filesystem::path& directory) {
    std::optional<snug::TensorsInFile> in_files;
    if (way.all_in_files) {
      in_files.emplace(directory);
    }
    torch::manual_seed(1);
    model_ = snug::Gpt(snug::GptOptions{.context = kContext, .layers = kLayers, .heads = width / 32, .width = width});
    in_files.reset();
    if (way.has_split_weights) {
      model_->to(torch::kBFloat16);
      optimizer_ =
          std::make_unique<snug::AdamW8bit>(model_->parameters(), snug::AdamW8bitOptions{.split_weights = true});
    } else if (way.is_torch) {
      optimizer_ = std::make_unique<torch::optim::AdamW>(model_->parameters());
      return;
    } else {
      auto fused = std::make_unique<snug::AdamW>(model_->parameters());
      if (way.state_in_file) {
        fused->keep_state_in(snug::StateFile{.directory = directory});
      }
      optimizer_ = std::move(fused);
    }
    snug::StepperOptions options{.micro_batch = 1};
    if (way.plans) {
      options.budget.memory = limit;
    }
    if (way.all_in_files) {
      options.budget.offload = directory;
    }
    stepper_ = std::make_unique<snug::Stepper>(model_, *optimizer_, options);
  }

  int64_t parameters() const {
    int64_t count = 0;
    for (const Tensor& parameter : model_->parameters()) {
      count += parameter.numel();
    }
    return count;
  }
  const snug::Stepper* stepper() const { return stepper_.get(); }

  // `tokens`: [sequences, kContext].
  void step(const Tensor& tokens) {
    if (stepper_) {
      stepper_->step({tokens},
                     [&](const snug::Batch& micro) { return snug::Loss::mean(loss_of(micro[0]), micro[0].numel()); });
      return;
    }
    optimizer_->zero_grad();
    loss_of(tokens).backward();
    optimizer_->step();
  }

 private:
  Tensor loss_of(const Tensor& tokens) {
    const Tensor logits = model_->forward(tokens).to(torch::kFloat);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.flatten());
  }

  snug::Gpt model_ = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<snug::Stepper> stepper_;
};

Tensor tokens_of(int64_t sequences) { return torch::randint(256, {sequences, kContext}); }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: benchmark_largest_gpt DIRECTORY [LIMIT [WIDTH-IN-FILES]]\n";
    return 2;
  }
  const std::filesystem::path directory = argv[1];
  const snug::Bytes limit = snug::Bytes::parse(argc > 2 ? argv[2] : "1GiB");
  const int64_t width_in_files = argc > 3 ? std::atoi(argv[3]) : 1696;
  std::cout << "| way | width | parameters | peak of a step | s a step | tokens/s |\n|---|---|---|---|---|---|\n";
  int64_t from = 1;  // in units: what plain LibTorch trains, each way does
  for (const Way& way : kWays) {
    const auto trains = [&](int64_t at) {
      return snug::cli::fits(torch::kCPU, limit.count(), [&] {
        Training training(way, at, limit, directory);
        training.step(tokens_of(way.is_torch ? kSequences : 2));
        training.step(tokens_of(way.is_torch ? kSequences : 2));
      });
    };
    const int64_t width =
        way.all_in_files ? width_in_files : kWidthUnit * (from + snug::cli::largest(64, [&](int64_t more) {
                                                            return trains(kWidthUnit * (from + more));
                                                          }));
    from = way.is_torch ? width / kWidthUnit : from;
    const snug::MemoryLimit enforced(torch::kCPU, limit);
    Training training(way, width, limit, directory);
    const Tensor tokens = tokens_of(kSequences);
    training.step(tokens);  // makes plan and state
    const int64_t before = snug::live_bytes(torch::kCPU).count();
    const snug::MemoryMeter meter;
    const double seconds = snug::cli::seconds_of(torch::kCPU, [&] { training.step(tokens); });
    std::cout << fmt::format("| {} | {} | {:.1f} M | {} | {:.1f} | {:.0f} |", way.name, width,
                             static_cast<double>(training.parameters()) / 1e6,
                             snug::Bytes(meter.report().peak_bytes + before).str(), seconds,
                             static_cast<double>(tokens.numel()) / seconds)
              << std::endl;
  }
}
