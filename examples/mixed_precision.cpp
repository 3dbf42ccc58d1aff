// Mixed precision in a hand-written loop: forward in 16 bits under autocast, the loss scaled, gradients unscaled and
// clipped, and the step skipped when one is not finite. Weights are FP32 throughout, so what is saved is FP32; it is
// loaded back at the end.

#include <cstdio>
#include <filesystem>
#include <iostream>

#include <snug/snug.h>

namespace {

torch::nn::Sequential make_model() {
  return torch::nn::Sequential(torch::nn::Linear(10, 5), torch::nn::ReLU(), torch::nn::Linear(5, 2));
}

}  // namespace

int main() {
  torch::manual_seed(1);
  auto model = make_model();
  snug::AdamW optimizer(model->parameters(), {.lr = 0.02});
  snug::GradScaler scaler({.init_scale = 1024});
  const auto x = torch::randn({256, 10});
  const auto y = torch::stack({x.sum(1), x.square().sum(1)}, 1) / 10;

  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      snug::Autocast autocast(torch::kCPU, torch::kHalf);
      loss = torch::mse_loss(model->forward(x).to(torch::kFloat), y);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    snug::clip_grad_norm_(model->parameters(), 1.0);
    if (!scaler.step(optimizer)) {
      std::cout << "step " << step << " skipped, a gradient was not finite\n";
    }
    scaler.update();
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << "loss " << first << " -> " << last << ", loss scale " << scaler.get_scale() << "\n";

  const auto path = std::filesystem::temp_directory_path() / "snug_mixed_precision.safetensors";
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& entry : model->named_parameters()) {
    tensors.emplace(entry.key(), entry.value().detach());
  }
  snug::save_safetensors(path, tensors);

  auto loaded = make_model();
  const auto saved = snug::load_safetensors(path);
  std::filesystem::remove(path);
  const torch::NoGradGuard no_grad;
  for (const auto& entry : loaded->named_parameters()) {
    entry.value().copy_(saved.at(entry.key()));
  }
  const bool same = torch::equal(loaded->forward(x), model->forward(x));
  std::cout << "loaded as " << saved.begin()->second.dtype() << ", same outputs: " << (same ? "yes" : "no") << "\n";
  if (!same || last > first / 3) {
    return 1;
  }
  std::cout << "mixed_precision: done\n";
}
