// Segmentation with an encoder that is frozen in the first epoch, and a new optimizer in each epoch. The plain loop,
// and the same loop by one Stepper within 60 % of the plain loop's memory: the same bits.

#include <algorithm>
#include <iostream>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::Tensor;
using torch::optim::Adam;
using torch::optim::AdamOptions;
namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr int64_t kItems = 8, kSide = 64, kEpochs = 3, kBatches = 2;
constexpr double kRate = 1e-3, kShare = 0.6;

nn::Sequential block(int64_t from, int64_t to, int64_t stride) {
  const auto conv = [](int64_t in, int64_t out, int64_t step) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(step).padding(1).bias(false));
  };
  return nn::Sequential(conv(from, to, stride), nn::BatchNorm2d(to), nn::ReLU(), conv(to, to, 1), nn::BatchNorm2d(to),
                        nn::ReLU());
}

// An encoder in three stages, and a decoder that gets the result of each.
struct SegmenterImpl : nn::Module {
  SegmenterImpl() {
    encoder = register_module("encoder", nn::ModuleList(block(3, 16, 1), block(16, 32, 2), block(32, 64, 2)));
    decoder = register_module("decoder", nn::ModuleList(block(64 + 32, 32, 1), block(32 + 16, 16, 1)));
    head = register_module("head", nn::Conv2d(16, 1, 1));
  }
  Tensor forward(Tensor x) {
    std::vector<Tensor> stages;
    for (const auto& stage : *encoder) {
      x = stage->as<nn::Sequential>()->forward(x);
      stages.push_back(x);
    }
    stages.pop_back();
    for (const auto& stage : *decoder) {
      x = F::interpolate(x, F::InterpolateFuncOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kNearest));
      x = stage->as<nn::Sequential>()->forward(torch::cat({x, stages.back()}, 1));
      stages.pop_back();
    }
    return head->forward(x);
  }
  // Frozen BatchNorm uses the averages that it has, and does not move them.
  void freeze_encoder(bool frozen) {
    encoder->train(!frozen);
    for (const Tensor& parameter : encoder->parameters()) {
      parameter.set_requires_grad(!frozen);
    }
  }

  nn::ModuleList encoder{nullptr}, decoder{nullptr};
  nn::Conv2d head{nullptr};
};
TORCH_MODULE(Segmenter);

// Noisy pictures of discs, and the discs.
snug::Batch batch_of(int64_t number) {
  torch::manual_seed(100 + static_cast<uint64_t>(number));
  const Tensor at = torch::arange(kSide, torch::kFloat);
  const Tensor centre = torch::randint(16, 48, {kItems, 2}, torch::kFloat),
               radius = torch::rand({kItems, 1, 1}) * 12 + 4;
  const Tensor down = (at - centre.select(1, 0).unsqueeze(1)).square().unsqueeze(2);
  const Tensor across = (at - centre.select(1, 1).unsqueeze(1)).square().unsqueeze(1);
  const Tensor mask = (down + across < radius.square()).to(torch::kFloat).unsqueeze(1);
  return {mask + torch::randn({kItems, 3, kSide, kSide}), mask};
}

// Twice the common area over the sum of both areas, as a mean over the items.
Tensor dice(const Tensor& logits, const Tensor& mask) {
  const Tensor found = (logits.detach() > 0).to(torch::kFloat);
  return ((2 * (found * mask).sum({1, 2, 3}) + 1) / ((found + mask).sum({1, 2, 3}) + 1)).mean();
}

struct Trained {
  std::vector<Tensor> tensors;
  std::vector<double> numbers;  // losses and dice
  snug::Bytes peak{0};          // of everything that the loop allocates
};

Trained result_of(const Segmenter& model, const snug::MemoryMeter& meter, const std::vector<double>& numbers) {
  Trained trained{model->parameters(), numbers, snug::Bytes(meter.report().peak_bytes)};
  for (const Tensor& buffer : model->buffers()) {
    trained.tensors.push_back(buffer);
  }
  return trained;
}

// loop: plain
Trained train_plainly() {
  torch::manual_seed(1);
  const snug::MemoryMeter meter;
  Segmenter model;
  std::vector<double> numbers;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    model->freeze_encoder(epoch == 0);
    Adam optimizer(model->parameters(), AdamOptions(epoch == 0 ? kRate : kRate / 4));
    for (int64_t i = 0; i < kBatches; ++i) {
      const snug::Batch batch = batch_of(epoch * kBatches + i);
      optimizer.zero_grad();
      const Tensor logits = model->forward(batch[0]);
      const Tensor loss = torch::binary_cross_entropy_with_logits(logits, batch[1]);
      loss.backward();
      optimizer.step();
      numbers.push_back(loss.item<double>());
      numbers.push_back(dice(logits, batch[1]).item<double>());
    }
  }
  return result_of(model, meter, numbers);
}

// loop: snug
Trained train_within(snug::Bytes budget) {
  torch::manual_seed(1);
  const snug::MemoryMeter meter;
  Segmenter model;
  Adam optimizer(model->parameters(), AdamOptions(kRate));
  snug::Stepper stepper(model, optimizer, {.budget = {.memory = budget}});
  std::vector<double> numbers;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    model->freeze_encoder(epoch == 0);
    optimizer.state().clear();  // a new optimizer, for a Stepper that keeps its plans
    optimizer.param_groups()[0].options().set_lr(epoch == 0 ? kRate : kRate / 4);
    for (int64_t i = 0; i < kBatches; ++i) {
      const auto result = stepper.step(batch_of(epoch * kBatches + i), [&](const snug::Batch& batch) {
        const Tensor logits = model->forward(batch[0]);
        const Tensor loss = torch::binary_cross_entropy_with_logits(logits, batch[1]);
        return snug::Loss::mean(loss, batch.size()).with("dice", dice(logits, batch[1]));
      });
      numbers.push_back(result.loss());
      numbers.push_back(result.metric("dice"));
    }
  }
  return result_of(model, meter, numbers);
}
// loop: end

}  // namespace

int main() {
  const Trained plain = train_plainly();
  const Trained planned = train_within(snug::live_bytes(torch::kCPU) + plain.peak * kShare);
  const bool same = planned.numbers == plain.numbers &&
                    std::ranges::equal(planned.tensors, plain.tensors, [](auto& a, auto& b) { return a.equal(b); });
  std::cout << "segmentation: plain peak " << plain.peak.str() << ", planned peak " << planned.peak.str()
            << (same ? ", the same bits" : ", other bits") << "\n";
  return same && planned.peak <= plain.peak * kShare ? 0 : 1;
}
