// A LibTorch program that uses snug. With everything kept, a step takes 62 MiB of tensors; here it has 32 MiB.

#include <iostream>

#include <snug/snug.h>

int main() {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(16, 512), torch::nn::GELU(), torch::nn::Linear(512, 512),
                              torch::nn::GELU(), torch::nn::Linear(512, 512), torch::nn::GELU(),
                              torch::nn::Linear(512, 1));
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  snug::Stepper stepper(model, optimizer, {.memory_budget = snug::Bytes::parse("32MiB")});

  const auto x = torch::randn({4096, 16});
  const auto y = x.sin().sum(1, /*keepdim=*/true);
  for (int step = 1; step <= 20; ++step) {
    const auto result = stepper.step({x, y}, [&](const snug::Batch& micro) {
      return snug::Loss::mean(torch::mse_loss(model->forward(micro[0]), micro[1]), micro[1].numel());
    });
    if (step == 1) {
      std::cout << stepper.plan()->verdict() << "\n";
    }
    if (step % 5 == 0) {
      std::cout << "step " << step << "  loss " << result.loss() << "  peak " << snug::Bytes(result.peak_bytes).str()
                << "\n";
    }
  }
  std::cout << "quickstart: done\n";
}
