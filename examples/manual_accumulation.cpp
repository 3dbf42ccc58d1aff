// Gradient accumulation by hand, in the four lines that everybody knows: divide the loss by K, go backward, and every K micro-batches
// step and zero. It equals the full batch where all micro-batches have the same size and the loss is a mean; snug::Stepper also
// takes uneven ones, losses over varying numbers of items, 16-bit types and a memory budget.

#include <iostream>

#include <snug/snug.h>

namespace {

torch::nn::Linear make_model() {
  torch::manual_seed(1);
  return torch::nn::Linear(8, 1);
}

}  // namespace

int main() {
  constexpr int64_t kBatch = 64, K = 4;
  auto full = make_model(), accumulated = make_model();
  torch::optim::SGD full_optimizer(full->parameters(), 0.05), optimizer(accumulated->parameters(), 0.05);
  const auto x = torch::randn({kBatch * 20, 8});
  const auto y = x.square().sum(1, /*keepdim=*/true);

  for (const auto& batch : snug::micro_batches({x, y}, kBatch)) {
    full_optimizer.zero_grad();
    torch::mse_loss(full->forward(batch[0]), batch[1]).backward();
    full_optimizer.step();
  }

  int64_t count = 0;
  for (const auto& micro : snug::micro_batches({x, y}, kBatch / K)) {
    auto loss = torch::mse_loss(accumulated->forward(micro[0]), micro[1]) / K;
    loss.backward();
    if (++count % K == 0) {
      optimizer.step(), optimizer.zero_grad();
    }
  }

  const double difference = ((full->weight - accumulated->weight).norm() / full->weight.norm()).item<double>();
  std::cout << "20 steps of 64 items, whole and in 4 parts: weights differ by " << difference << " of their norm\n";
  if (difference > 1e-6) {
    return 1;
  }
  std::cout << "manual_accumulation: done\n";
}
