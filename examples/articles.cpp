// The loops that articles on training under limits show, with snug: docs/articles.md has these functions beside the
// articles' own, and what became of their claims.

#include <algorithm>
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

float in_16_bits(SinCos& model, const Tensor& x, const Tensor& y, snug::Precision precision, int epochs) {
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

// Each head goes forward and backward by itself, as far as the trunk's output; then the trunk goes backward once. The
// last head comes first, as in backward of the sum.
void one_task_at_a_time(SinCos& model, const Tensor& x, const Tensor& y) {
  const Tensor h = model.trunk->forward(x);
  const Tensor split = h.detach().requires_grad_();
  squared_error(model.cosine->forward(split), y.narrow(1, 1, 1)).backward();
  squared_error(model.sine->forward(split), y.narrow(1, 0, 1)).backward();
  h.backward(split.grad());
}

Tensor in_segments(Sequential& model, const Tensor& x) { return snug::checkpoint_sequential(model, 2, x); }

void accumulated(Sequential& model, torch::optim::Optimizer& optimizer, const snug::Batch& batch) {
  snug::Stepper stepper(model, optimizer, {.micro_batch = 8});
  stepper.step(batch, [&](const snug::Batch& micro) {
    return snug::Loss::mean(torch::mse_loss(model->forward(micro[0]), micro[1]), micro.size());
  });
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

Tensor gradient_of(const Sequential& model) { return model->parameters()[0].grad().clone(); }

}  // namespace

int main() {
  torch::manual_seed(1);
  const Tensor x = torch::linspace(-2 * std::numbers::pi, 2 * std::numbers::pi, 64).unsqueeze(1);
  const Tensor y = torch::cat({x.sin(), x.cos()}, 1) + 0.02 * torch::rand({64, 2}) - 0.01;
  SinCos model;
  const float first = in_16_bits(model, x, y, snug::Precision::BFloat16, 1);
  const float last = in_16_bits(model, x, y, snug::Precision::BFloat16, 50);
  std::cout << "sine and cosine in BF16: loss " << first << " -> " << last << "\n";

  const auto expected = gradients(both_tasks_at_once, x, y), found = gradients(one_task_at_a_time, x, y);
  const bool same_tasks = std::equal(expected.begin(), expected.end(), found.begin(),
                                     [](const Tensor& a, const Tensor& b) { return torch::equal(a, b); });
  std::cout << "one task at a time: " << (same_tasks ? "the same bits" : "other gradients") << "\n";

  Sequential simple(Linear(10, 20), ReLU(), Linear(20, 30), ReLU(), Linear(30, 40));
  const Tensor input = torch::randn({20, 10});
  simple->forward(input).square().sum().backward();
  const Tensor plain = gradient_of(simple);
  simple->zero_grad();
  in_segments(simple, input).square().sum().backward();
  const bool same = torch::equal(gradient_of(simple), plain);
  std::cout << "two segments: " << (same ? "the same bits" : "other gradients") << "\n";

  snug::SGD optimizer(simple->parameters(), {.lr = 0.01});
  accumulated(simple, optimizer, {input, torch::zeros({20, 40})});
  if (!same || !same_tasks || !(last < first)) {
    return 1;
  }
  std::cout << "articles: done\n";
}
