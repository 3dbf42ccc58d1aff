#include <iostream>

#include <snug/distributed/data_parallel.h>
#include <snug/snug.h>

int main() {
  torch::nn::Linear model(4, 1);
  snug::AdamW optimizer(model->parameters(), {.lr = 0.1});
  snug::DataParallel ddp(model, snug::init_process_group({.rank = 0, .size = 1}));
  snug::Stepper stepper(model, optimizer, {.ranks = {.data_parallel = &ddp}});
  const auto result = stepper.step({torch::ones({8, 4})}, [&](const snug::Batch& batch) {
    const auto y = model->forward(batch[0]);
    return snug::Loss::sum(y.square().sum(), y.numel());
  });
  std::cout << "distributed_consumer: " << ddp.group().size() << " rank, stepped " << result.stepped() << "\n";
  return result.stepped() ? 0 : 1;
}
