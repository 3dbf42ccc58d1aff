// A LibTorch program that uses snug: batches of 256 in micro-batches of 32, each block's activations recomputed in
// backward, the step kept under 64 MiB.

#include <iostream>

#include <snug/snug.h>

int main() {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(16, 512), torch::nn::GELU(), torch::nn::Linear(512, 512),
                              torch::nn::GELU(), torch::nn::Linear(512, 512), torch::nn::GELU(),
                              torch::nn::Linear(512, 1));
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-3, .weight_decay = 0.1});
  snug::Stepper stepper(model, optimizer,
                        {.micro_batch = 32, .memory_budget = snug::Bytes::parse("64MiB"), .clip_norm = 1.0});

  const auto x = torch::randn({256, 16});
  const auto y = x.sin().sum(1, /*keepdim=*/true);
  for (int step = 1; step <= 100; ++step) {
    const auto result = stepper.step({x, y}, [&](const snug::Batch& micro) {
      const auto predicted = snug::checkpoint_sequential(model, 2, micro[0]);
      return snug::Loss::sum((predicted - micro[1]).square().sum(), micro[1].numel());
    });
    if (step % 20 == 0) {
      std::cout << "step " << step << "  loss " << result.loss() << "  peak " << snug::Bytes(result.peak_bytes).str()
                << "\n";
    }
  }
  std::cout << "quickstart: done\n";
}
