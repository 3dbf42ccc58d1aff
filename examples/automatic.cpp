// A model within a number of bytes: by a plan, by a Stepper, and with a disk. docs/plans.md shows this code.

#include <filesystem>
#include <iostream>
#include <optional>
#include <tuple>

#include <snug/snug.h>

namespace {

using torch::Tensor;

torch::nn::Sequential deep_model() {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int layer = 0; layer < 16; ++layer) {
    model->push_back(torch::nn::Linear(256, 256));
    model->push_back(torch::nn::GELU());
  }
  return model;
}

void plan_and_train(torch::nn::Sequential& model, const Tensor& x, const Tensor& y) {
  const auto step = [&] { return torch::mse_loss(model->forward(x), y); };
  const snug::ActivationPlan plan = snug::plan_activations(step, snug::Bytes::parse("16MiB"));
  std::cout << plan.explain();

  Tensor loss;
  {
    const snug::Rematerialize scope(plan);
    loss = step();
  }
  loss.backward();
}

void let_a_stepper_plan(torch::nn::Sequential& model, const Tensor& x, const Tensor& y) {
  const auto loss_of = [&](const snug::Batch& micro) {
    return snug::Loss::mean(torch::mse_loss(model->forward(micro[0]), micro[1]), micro.size());
  };
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  snug::Stepper stepper(model, optimizer, {.budget = {.memory = snug::Bytes::parse("40MiB")}});
  const auto result = stepper.step({x, y}, loss_of);  // its first step plans
  std::cout << stepper.plan()->explain();
  std::cout << "peak " << snug::Bytes(result.peak_bytes).str() << "\n";
}

void plan_with_a_disk(torch::nn::Sequential& model, const Tensor& x, const Tensor& y, snug::Bytes budget) {
  const std::string scratch = std::filesystem::temp_directory_path().string();
  const auto step = [&] { return torch::mse_loss(model->forward(x), y); };
  const snug::OffloadLink link = snug::measure_offload_link(scratch);  // or numbers of your own
  const snug::ActivationPlan plan = snug::plan_activations(step, budget, link);
  std::cout << plan.explain();
}

// A model that is built and trained in fewer bytes than its weights take: 4 MiB of them in 2 MiB.
void train_outside_of_memory(const Tensor& x, const Tensor& y) {
  const std::string scratch = std::filesystem::temp_directory_path().string();
  const snug::Bytes budget = snug::live_bytes(torch::kCPU) + snug::Bytes::parse("2MiB");
  std::optional<snug::TensorsInFile> in_file(std::in_place, scratch);
  auto model = deep_model();  // its weights are in files from the beginning
  in_file.reset();
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  snug::Stepper stepper(model, optimizer, {.clip_norm = 1.0, .budget = {.memory = budget, .offload = scratch}});
  stepper.step({x, y}, [&](const snug::Batch& micro) {
    return snug::Loss::mean(torch::mse_loss(model->forward(micro[0]), micro[1]), micro.size());
  });
  std::cout << stepper.plan()->verdict() << "\n";
}

// A recurrent network that goes on, in each step, from where the last one ended.
void carry_state(snug::Bytes budget) {
  torch::nn::LSTMCell cell(256, 256);
  Tensor h = torch::zeros({32, 256}), c = torch::zeros({32, 256});
  snug::AdamW optimizer(cell->parameters(), {.lr = 1e-3});
  snug::Stepper stepper(cell, optimizer, {.budget = {.memory = budget, .carried = {&h, &c}}});
  for (int step = 1; step <= 3; ++step) {
    stepper.step({torch::randn({32, 16, 256})}, [&](const snug::Batch& micro) {
      auto state = std::tuple(h, c);
      for (int64_t t = 0; t < 16; ++t) {
        state = cell->forward(micro[0].select(1, t), state);
      }
      h = std::get<0>(state).detach();
      c = std::get<1>(state).detach();
      return snug::Loss::mean(std::get<0>(state).square().mean(), micro.size());
    });
  }
}

}  // namespace

int main() {
  auto model = deep_model();
  const Tensor x = torch::randn({1024, 256});
  const Tensor y = torch::randn({1024, 256});
  plan_and_train(model, x, y);
  model->zero_grad();
  let_a_stepper_plan(model, x, y);
  model->zero_grad();
  plan_with_a_disk(model, x, y, snug::Bytes::parse("12MiB"));
  model = nullptr;
  train_outside_of_memory(x, y);
  carry_state(snug::Bytes::parse("24MiB"));
  std::cout << "automatic: done\n";
}
