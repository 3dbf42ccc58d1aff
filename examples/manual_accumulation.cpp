// Gradient accumulation in four ways: the four lines that everybody knows, right where all parts have the same size
// and the loss is a mean; a window, for a loop of one's own and parts of any size; a Stepper; and a Stepper over a
// loader's batches. docs/by-hand.md shows these functions.

#include <iostream>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::mse_loss;

constexpr int64_t kBatch = 64, K = 4;

torch::nn::Linear make_model() {
  torch::manual_seed(1);
  return torch::nn::Linear(8, 1);
}

void whole(torch::nn::Linear& model, torch::optim::Optimizer& optimizer, const std::vector<snug::Batch>& batches) {
  for (const auto& batch : batches) {
    optimizer.zero_grad();
    mse_loss(model->forward(batch[0]), batch[1]).backward();
    optimizer.step();
  }
}

void by_hand(torch::nn::Linear& model, torch::optim::Optimizer& optimizer, const std::vector<snug::Batch>& batches) {
  for (const auto& batch : batches) {
    optimizer.zero_grad();
    for (const auto& micro : snug::micro_batches(batch, kBatch / K)) {
      (mse_loss(model->forward(micro[0]), micro[1]) / K).backward();
    }
    optimizer.step();
  }
}

void by_window(torch::nn::Linear& model, torch::optim::Optimizer& optimizer, const std::vector<snug::Batch>& batches) {
  snug::AccumulationWindow window(model->named_parameters().pairs());
  for (const auto& batch : batches) {
    optimizer.zero_grad();
    for (const auto& micro : snug::micro_batches(batch, 25)) {  // 25, 25, 14
      const auto loss = snug::Loss::mean(mse_loss(model->forward(micro[0]), micro[1]), micro.size());
      window.weigh(loss, /*expected_parts=*/3).backward();
    }
    window.close();  // now the gradients are those of the mean over all items
    optimizer.step();
  }
}

void by_stepper(torch::nn::Linear& model, torch::optim::Optimizer& optimizer, const std::vector<snug::Batch>& batches) {
  snug::Stepper stepper(model, optimizer, {.micro_batch = 25});
  for (const auto& batch : batches) {
    stepper.step(batch, [&](const snug::Batch& micro) {
      return snug::Loss::mean(mse_loss(model->forward(micro[0]), micro[1]), micro.size());
    });
  }
}

void by_loader(torch::nn::Linear& model, torch::optim::Optimizer& optimizer, const std::vector<snug::Batch>& batches) {
  snug::Stepper stepper(model, optimizer, {.accumulate = {.every = K}});
  for (const auto& batch : batches) {
    for (const auto& micro : snug::micro_batches(batch, kBatch / K)) {  // as a loader yields them
      const auto result = stepper.accumulate(micro, [&](const snug::Batch& part) {
        return snug::Loss::mean(mse_loss(model->forward(part[0]), part[1]), part.size());
      });
      if (result) {  // every fourth time
        std::cout << "loss " << result->loss() << "\n";
      }
    }
  }
  stepper.flush();  // at the end of an epoch: a window that has fewer micro-batches
}

}  // namespace

int main() {
  const auto x = torch::randn({kBatch * 20, 8});
  const auto y = x.square().sum(1, /*keepdim=*/true);
  const auto batches = snug::micro_batches({x, y}, kBatch);
  const auto trained = [&](auto train) {
    auto model = make_model();
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    train(model, optimizer, batches);
    return model->weight.detach();
  };
  const auto expected = trained(whole);
  for (const auto& weight : {trained(by_hand), trained(by_window), trained(by_stepper), trained(by_loader)}) {
    const double difference = ((weight - expected).norm() / expected.norm()).item<double>();
    std::cout << "20 steps of 64 items, whole and in parts: weights differ by " << difference << " of their norm\n";
    if (difference > 1e-6) {
      return 1;
    }
  }
  std::cout << "manual_accumulation: done\n";
}
