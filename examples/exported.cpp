// Trains a model that Python exported, on random batches, within a budget of bytes. See docs/exported.md.
//
//   exported MODEL.pt2 TRAINED.safetensors [MEMORY]

#include <iostream>
#include <string>

#include <snug/exported/exported_module.h>
#include <snug/snug.h>

namespace {

// 16 items for each input of the model in docs/exported.md: 8 numbers, and which of 3 classes they belong to.
snug::Batch some_batch() {
  const auto x = torch::randn({16, 8});
  return {x, x.slice(1, 0, 3).argmax(1)};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cout << "usage: exported MODEL.pt2 TRAINED.safetensors [MEMORY]\n";
    return 0;
  }
  torch::manual_seed(1);
  const auto budget = argc > 3 ? snug::Bytes::parse(argv[3]) : snug::Bytes::unlimited();
  auto model = snug::load_exported(argv[1]);
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-2});
  snug::Stepper stepper(*model, optimizer, {.budget = {.memory = budget}});
  for (int step = 0; step < 50; ++step) {
    const auto result = stepper.step(some_batch(), [&](const snug::Batch& batch) {
      return snug::Loss::mean(model->loss(batch.tensors()), batch.size());
    });
    if (step % 10 == 0) {
      std::cout << "step " << step << ": loss " << result.loss() << "\n";
    }
  }
  model->eval();
  std::cout << "eval: loss " << model->forward(some_batch().tensors()).item<float>() << "\n";
  snug::save_safetensors(argv[2], model->state_dict(), {{"format", "pt"}});
}
