// Every technique for activations that is switched on by hand, on one small model: gradients equal plain training's,
// and fewer bytes are held for backward. docs/by-hand.md shows these functions.

#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::Tensor;

struct Model {
  std::vector<torch::nn::Sequential> blocks;
  torch::nn::Linear head = nullptr;
};

Tensor plain(Model& model, Tensor h) {
  for (auto& block : model.blocks) {
    h = h + block->forward(h);
  }
  return h;
}

Tensor every_block(Model& model, Tensor h) {
  for (auto& block : model.blocks) {
    h = h + snug::checkpoint({.label = "block"}, block, h);
  }
  return h;
}

Tensor segments(Model& model, Tensor h) {
  std::vector<std::function<Tensor(Tensor)>> layers;
  for (auto& block : model.blocks) {
    layers.emplace_back([block](Tensor x) mutable { return x + block->forward(x); });
  }
  return snug::checkpoint_sequential(layers, /*segments=*/4, h, snug::LastSegment::Recompute);
}

Tensor halves(const Model& model, size_t begin, size_t end, Tensor h) {
  if (end - begin == 1) {
    return h + torch::nn::Sequential(model.blocks[begin])->forward(h);
  }
  const size_t middle = (begin + end) / 2;
  h = snug::checkpoint([=, &model](Tensor x) { return halves(model, begin, middle, x); }, h);
  return snug::checkpoint([=, &model](Tensor x) { return halves(model, middle, end, x); }, h);
}

Tensor products_kept(Model& model, Tensor h) {
  for (auto& block : model.blocks) {
    h = h + snug::checkpoint({.policy = snug::save_matmuls}, block, h);
  }
  return h;
}

Tensor in_a_file(Model& model, Tensor h) {
  const snug::SaveOnHost offload({.min_bytes = snug::Bytes::parse("64KiB")});  // .directory: on a disk
  return plain(model, h);
}

Tensor reversible(Model& model, Tensor h) {
  snug::ReversibleSequential chain;
  for (size_t i = 0; i + 1 < model.blocks.size(); i += 2) {
    chain.push_back(model.blocks[i], model.blocks[i + 1]);
  }
  const auto [a, b] = chain.forward(h, h);
  return a + b;
}

Tensor loss_without_logits(Model& model, const Tensor& h, const Tensor& targets) {
  return snug::chunked_cross_entropy(h, model.head->weight, targets, {.chunk = 64, .bias = model.head->bias});
}

Tensor a_slice_at_a_time(Model& model, const Tensor& rows) {
  return snug::sliced([&](const Tensor& slice) { return plain(model, slice); }, rows, {.slices = 8});
}

// One head at a time, the last one first, as in backward of the sum; then the trunk.
void one_head_at_a_time(Model& model, const Tensor& h, const Tensor& targets) {
  const Tensor split = h.detach().requires_grad_();
  split.square().mean().backward();
  loss_without_logits(model, split, targets).backward();
  h.backward(split.grad());
}

Model make_model() {
  torch::manual_seed(1);
  Model model;
  for (int i = 0; i < 8; ++i) {
    model.blocks.emplace_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})), torch::nn::Linear(64, 256),
                              torch::nn::GELU(), torch::nn::Linear(256, 64));
  }
  model.head = torch::nn::Linear(64, 100);
  return model;
}

struct Outcome {
  Tensor gradient;  // of the first block's first weight
  int64_t held;     // bytes, between forward and backward
};

Outcome run(const std::function<Tensor(Model&, Tensor)>& forward) {
  Model model = make_model();
  const Tensor x = torch::randn({256, 64}), targets = torch::randint(100, {256});
  const snug::MemoryMeter meter;
  const Tensor h = forward(model, x);
  const int64_t held = meter.report().live_bytes;
  one_head_at_a_time(model, h, targets);
  return {model.blocks[0][1]->as<torch::nn::Linear>()->weight.grad(), held};
}

}  // namespace

int main() {
  const Outcome expected = run(plain);
  const auto recursive = [](Model& model, const Tensor& h) { return halves(model, 0, model.blocks.size(), h); };
  bool all_well = true;
  for (const auto& [name, forward, is_exact] :
       std::vector<std::tuple<std::string, std::function<Tensor(Model&, Tensor)>, bool>>{
           {"every block", every_block, true},
           {"4 segments", segments, true},
           {"nested halves", recursive, true},
           {"every block, products kept", products_kept, true},
           {"in a file", in_a_file, true},
           {"in slices", a_slice_at_a_time, false}}) {
    const Outcome found = run(forward);
    const double error = ((found.gradient - expected.gradient).norm() / expected.gradient.norm()).item<double>();
    std::cout << name << ": holds " << snug::Bytes(found.held).str() << " of " << snug::Bytes(expected.held).str()
              << ", gradient off by " << error << "\n";
    all_well = all_well && found.held < expected.held && (is_exact ? error == 0 : error < 0.05);
  }
  const Outcome chain = run(reversible);  // another model: two streams
  std::cout << "reversible: holds " << snug::Bytes(chain.held).str() << "\n";
  if (!all_well || chain.held > expected.held / 4) {
    return 1;
  }
  std::cout << "activation_memory: done\n";
}
