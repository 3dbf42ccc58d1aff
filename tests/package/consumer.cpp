#include <iostream>

#include <snug/snug.h>

int main() {
  torch::nn::Linear model(4, 1);
  snug::AdamW optimizer(model->parameters(), {.lr = 0.1});
  snug::Stepper stepper(model, optimizer, {.micro_batch = 3});
  const auto x = torch::ones({8, 4});
  const auto result = stepper.step({x}, [&](const snug::Batch& micro) {
    const auto y = snug::checkpoint([&](torch::Tensor h) { return model->forward(h); }, micro[0]);
    return snug::Loss::sum(y.square().sum(), y.numel());
  });
  std::cout << "consumer: " << result.micro_batches << " micro-batches, stepped " << result.stepped() << "\n";
  return result.stepped() && result.micro_batches == 3 ? 0 : 1;
}
