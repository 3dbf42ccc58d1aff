// A LibTorch program that uses snug. With everything kept, a step takes 62 MiB of tensors; the budget is 32 MiB.

#include <iostream>

#include <snug/snug.h>

using torch::nn::GELU;
using torch::nn::Linear;

int main() {
  torch::nn::Sequential model(Linear(16, 512), GELU(), Linear(512, 512), GELU(), Linear(512, 512), GELU(),
                              Linear(512, 1));
  const auto x = torch::randn({4096, 16}), y = x.sin().sum(1, /*keepdim=*/true);

  snug::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  snug::Stepper stepper(model, optimizer, {.budget = {.memory = snug::Bytes::parse("32MiB")}});
  for (int step = 0; step < 20; ++step) {
    const auto result = stepper.step({x, y}, [&](const snug::Batch& part) {
      return snug::Loss::mean(torch::mse_loss(model->forward(part[0]), part[1]), part[1].numel());
    });
    std::cout << "loss " << result.loss() << "\n";
  }
  std::cout << stepper.plan()->verdict() << "\n";
}
