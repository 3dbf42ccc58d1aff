// Optimizers that take less memory or time, on one small model: what they keep, and that they train. docs/optimizers.md
// shows these functions.

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::mse_loss;
using torch::Tensor;
using Model = torch::nn::Sequential;
using Step = std::function<void(const Tensor& x, const Tensor& y)>;

Step plain_adamw(Model& model) {
  auto optimizer = std::make_shared<snug::AdamW>(model->parameters(), snug::AdamWOptions{.lr = 1e-2});
  return [optimizer, model](const Tensor& x, const Tensor& y) mutable {
    optimizer->zero_grad();
    mse_loss(model->forward(x), y).backward();
    optimizer->step();
  };
}

Step in_8_bits(Model& model) {
  auto optimizer = std::make_shared<snug::AdamW8bit>(model->parameters(), snug::AdamW8bitOptions{.lr = 1e-2});
  return [optimizer, model](const Tensor& x, const Tensor& y) mutable {
    optimizer->zero_grad();
    mse_loss(model->forward(x), y).backward();
    optimizer->step();
  };
}

Step state_in_a_file(Model& model) {
  auto optimizer = std::make_shared<snug::AdamW>(model->parameters(), snug::AdamWOptions{.lr = 1e-2});
  optimizer->keep_state_in(
      snug::StateFile{.directory = std::filesystem::temp_directory_path(), .window = snug::Bytes(192 << 10)});
  return [optimizer, model](const Tensor& x, const Tensor& y) mutable {
    optimizer->zero_grad();
    mse_loss(model->forward(x), y).backward();
    optimizer->step();
  };
}

Step in_backward(Model& model) {
  auto optimizer = std::make_shared<snug::AdamW>(model->parameters(), snug::AdamWOptions{.lr = 1e-2});
  auto guard = std::make_shared<snug::StepInBackward>(*optimizer);
  return [optimizer, guard, model](const Tensor& x, const Tensor& y) mutable {
    mse_loss(model->forward(x), y).backward();  // the model is updated when this returns
  };
}

Step bf16_weights(Model& model) {
  model->to(torch::kBFloat16);
  auto optimizer =
      std::make_shared<snug::AdamW>(model->parameters(), snug::AdamWOptions{.lr = 1e-2, .stochastic_rounding = true});
  return [optimizer, model](const Tensor& x, const Tensor& y) mutable {
    optimizer->zero_grad();
    mse_loss(model->forward(x.to(torch::kBFloat16)).to(torch::kFloat), y).backward();
    optimizer->step();
  };
}

Step split_weights(Model& model) {
  model->to(torch::kBFloat16);
  auto optimizer =
      std::make_shared<snug::AdamW8bit>(model->parameters(), snug::AdamW8bitOptions{.lr = 1e-2, .split_weights = true});
  auto guard = std::make_shared<snug::StepInBackward>(*optimizer);  // 5 bytes a parameter; without it, 7
  return [optimizer, guard, model](const Tensor& x, const Tensor& y) mutable {
    mse_loss(model->forward(x.to(torch::kBFloat16)).to(torch::kFloat), y).backward();
  };
}

// An optimizer of a program's own, which says the bytes of a step, so that a budget can be kept from the first step on.
class SignSgd : public torch::optim::Optimizer, public snug::MemoryAware {
 public:
  SignSgd(const std::vector<Tensor>& parameters, double lr)
      : Optimizer(parameters, std::make_unique<torch::optim::SGDOptions>(lr)) {}

  Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) {
          parameter.sub_(parameter.grad().sign(), group.options().get_lr());
        }
      }
    }
    return {};
  }

  std::vector<Tensor> state_tensors() const override { return {}; }
  int64_t state_bytes_to_come_of(const std::function<bool(const Tensor&)>& /*gets_gradient*/) const override {
    return 0;
  }
  int64_t workspace_bytes() const override {  // the signs of the largest gradient
    size_t largest = 0;
    for (const auto& group : param_groups()) {
      for (const Tensor& parameter : group.params()) {
        largest = std::max(largest, parameter.nbytes());
      }
    }
    return static_cast<int64_t>(largest);
  }
};

Step own_optimizer(Model& model) {
  auto optimizer = std::make_shared<SignSgd>(model->parameters(), 1e-3);
  auto stepper = std::make_shared<snug::Stepper>(
      *model, *optimizer, snug::StepperOptions{.budget = {.memory = snug::Bytes::parse("2MiB")}});
  return [optimizer, stepper, model](const Tensor& x, const Tensor& y) mutable {
    stepper->step({x, y}, [&](const snug::Batch& part) {
      return snug::Loss::mean(mse_loss(model->forward(part[0]), part[1]), part[1].numel());
    });
  };
}

struct Outcome {
  double first, last;
  int64_t bytes;  // between two steps: weights, gradients, state
};

Outcome train(const std::function<Step(Model&)>& make) {
  const int64_t before = snug::live_bytes(torch::kCPU).count();
  torch::manual_seed(1);
  Model model(torch::nn::Linear(16, 256), torch::nn::GELU(), torch::nn::Linear(256, 256), torch::nn::GELU(),
              torch::nn::Linear(256, 1));
  const Step step = make(model);
  const Tensor x = torch::randn({64, 16}), y = x.sum(1, /*keepdim=*/true);
  const auto loss = [&] {
    const torch::NoGradGuard no_grad;
    const auto dtype = model->parameters()[0].scalar_type();
    return mse_loss(model->forward(x.to(dtype)).to(torch::kFloat), y).item<double>();
  };
  Outcome outcome{.first = loss()};
  for (int i = 0; i < 50; ++i) {
    step(x, y);
  }
  outcome.last = loss();
  outcome.bytes = snug::live_bytes(torch::kCPU).count() - before - static_cast<int64_t>(x.nbytes() + y.nbytes());
  return outcome;
}

}  // namespace

int main() {
  const Outcome usual = train(plain_adamw);
  std::cout << "AdamW: loss " << usual.first << " -> " << usual.last << ", holds " << snug::Bytes(usual.bytes).str()
            << "\n";
  bool all_well = usual.last < usual.first / 10;
  for (const auto& [name, make] : std::vector<std::pair<const char*, std::function<Step(Model&)>>>{
           {"AdamW8bit", in_8_bits},
           {"state in a file", state_in_a_file},
           {"StepInBackward", in_backward},
           {"BF16 weights, rounded at random", bf16_weights},
           {"AdamW8bit of BF16 weights, in backward", split_weights},
           {"an optimizer of the program's own", own_optimizer}}) {
    const Outcome found = train(make);
    std::cout << name << ": loss " << found.first << " -> " << found.last << ", holds "
              << snug::Bytes(found.bytes).str() << "\n";
    all_well = all_well && found.last < found.first / 10 && found.bytes < usual.bytes * 4 / 5;
  }
  if (!all_well) {
    return 1;
  }
  std::cout << "optimizers: done\n";
}
