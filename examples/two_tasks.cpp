// A network that learns sine and cosine at once: in FP32 and in BF16, and with one backward pass for each task, so that
// only one head's graph is alive at a time. See docs/by-hand.md and docs/precision.md.

#include <iostream>
#include <numbers>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::Tensor;
using torch::nn::Linear;
using torch::nn::ReLU;
using torch::nn::Sequential;

// One trunk, two tasks: y is [N, 2].
struct SinCos : torch::nn::Module {
  Sequential trunk{Linear(1, 150), ReLU(), Linear(150, 150), ReLU(), Linear(150, 150), ReLU()};
  Sequential sine{Linear(150, 150), ReLU(), Linear(150, 1)}, cosine{Linear(150, 150), ReLU(), Linear(150, 1)};

  SinCos() {
    register_module("trunk", trunk);
    register_module("sine", sine);
    register_module("cosine", cosine);
  }
};

Tensor squared_error(const Tensor& predicted, const Tensor& wanted) {
  return torch::mse_loss(predicted.to(torch::kFloat), wanted);
}

// The last of `epochs` losses.
float train(const Tensor& x, const Tensor& y, snug::Precision precision, int epochs) {
  torch::manual_seed(1);
  SinCos model;
  snug::Adam optimizer(model.parameters(), {.lr = 0.01});
  snug::Stepper stepper(model, optimizer, {.precision = precision});
  float loss = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const auto result = stepper.step({x, y}, [&](const snug::Batch& batch) {
      const Tensor h = model.trunk->forward(batch[0]);
      const Tensor predicted = torch::cat({model.sine->forward(h), model.cosine->forward(h)}, 1);
      return snug::Loss::mean(squared_error(predicted, batch[1]), batch.size());
    });
    loss = static_cast<float>(result.loss());
  }
  return loss;
}

void both_tasks_at_once(SinCos& model, const Tensor& x, const Tensor& y) {
  const Tensor h = model.trunk->forward(x);
  const Tensor sine = squared_error(model.sine->forward(h), y.narrow(1, 0, 1));
  const Tensor cosine = squared_error(model.cosine->forward(h), y.narrow(1, 1, 1));
  (sine + cosine).backward();
}

// Each head goes forward and backward by itself, as far as the trunk's output; then the trunk goes backward once.
void one_task_at_a_time(SinCos& model, const Tensor& x, const Tensor& y) {
  const Tensor h = model.trunk->forward(x);
  const Tensor split = h.detach().requires_grad_();
  squared_error(model.cosine->forward(split), y.narrow(1, 1, 1)).backward();
  squared_error(model.sine->forward(split), y.narrow(1, 0, 1)).backward();
  h.backward(split.grad());
}

template <class Tasks>
std::vector<Tensor> gradients(const Tasks& tasks, const Tensor& x, const Tensor& y) {
  torch::manual_seed(1);
  SinCos model;
  tasks(model, x, y);
  std::vector<Tensor> all;
  for (const Tensor& parameter : model.parameters()) {
    all.push_back(parameter.grad());
  }
  return all;
}

}  // namespace

int main() {
  torch::manual_seed(1);
  const Tensor x = torch::linspace(-2 * std::numbers::pi, 2 * std::numbers::pi, 64).unsqueeze(1);
  const Tensor y = torch::cat({x.sin(), x.cos()}, 1) + 0.02 * torch::rand({64, 2}) - 0.01;
  bool has_learned = true;
  for (const auto precision : {snug::Precision::Float32, snug::Precision::BFloat16}) {
    const float first = train(x, y, precision, 1), last = train(x, y, precision, 50);
    std::cout << (precision == snug::Precision::Float32 ? "FP32" : "BF16") << ": loss " << first << " -> " << last
              << "\n";
    has_learned = has_learned && last < first;
  }
  const auto at_once = gradients(both_tasks_at_once, x, y), in_turn = gradients(one_task_at_a_time, x, y);
  bool is_same = true;
  for (size_t i = 0; i < at_once.size(); ++i) {
    is_same = is_same && torch::equal(at_once[i], in_turn[i]);
  }
  std::cout << "one backward pass for each task: " << (is_same ? "the same bits" : "other gradients") << "\n";
  return has_learned && is_same ? 0 : 1;
}
