// A GAN: a generator and its discriminator, each with an optimizer of its own, share one forward pass of the generator.
// The plain loop, and the same loop by one Stepper within 60 % of the plain loop's memory: the same bits.

#include <algorithm>
#include <iostream>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::Tensor;
using torch::optim::Adam;
using torch::optim::AdamOptions;
namespace nn = torch::nn;

constexpr int64_t kItems = 64, kNoise = 32, kChannels = 16, kSteps = 4;
constexpr double kRateOfGenerator = 1e-3, kRateOfDiscriminator = 2e-4, kShare = 0.6;

// Noise becomes pictures of 32 x 32, and pictures become one number.
struct GanImpl : nn::Module {
  GanImpl() {
    const auto up = [](int64_t from, int64_t to, int64_t stride) {
      const int64_t padding = stride == 1 ? 0 : 1;
      return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(from, to, 4).stride(stride).padding(padding).bias(false));
    };
    const auto down = [](int64_t from, int64_t to) {
      return nn::Conv2d(nn::Conv2dOptions(from, to, 4).stride(2).padding(1).bias(false));
    };
    generator = register_module(
        "generator", nn::Sequential(up(kNoise, 4 * kChannels, 1), nn::BatchNorm2d(4 * kChannels), nn::ReLU(),
                                    up(4 * kChannels, 2 * kChannels, 2), nn::BatchNorm2d(2 * kChannels), nn::ReLU(),
                                    up(2 * kChannels, kChannels, 2), nn::BatchNorm2d(kChannels), nn::ReLU(),
                                    up(kChannels, 1, 2), nn::Tanh()));
    discriminator = register_module(
        "discriminator",
        nn::Sequential(down(1, kChannels), nn::SiLU(), down(kChannels, 2 * kChannels), nn::BatchNorm2d(2 * kChannels),
                       nn::SiLU(), down(2 * kChannels, 4 * kChannels), nn::BatchNorm2d(4 * kChannels), nn::SiLU(),
                       nn::Flatten(), nn::Linear(4 * kChannels * 16, 1)));
  }
  nn::Sequential generator{nullptr}, discriminator{nullptr};
};
TORCH_MODULE(Gan);

struct Losses {
  Tensor of_generator, of_discriminator;
};

// Each loss has gradients for its own model alone: the generator's passes a discriminator that is frozen for the call,
// and the discriminator's passes pictures without a graph.
Losses losses(Gan& gan, const Tensor& real, const Tensor& noise) {
  const auto says = [&gan](const Tensor& pictures, bool is_real) {
    const Tensor logits = gan->discriminator->forward(pictures);
    return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, is_real ? 1.0 : 0.0));
  };
  const auto freeze = [&gan](bool frozen) {
    for (const Tensor& parameter : gan->discriminator->parameters()) {
      parameter.set_requires_grad(!frozen);
    }
  };
  const Tensor made = gan->generator->forward(noise);
  freeze(true);
  const Tensor of_generator = says(made, true);
  freeze(false);
  return {of_generator, says(real, true) + says(made.detach(), false)};
}

// Bright squares on a dark ground, and noise.
snug::Batch batch_of(int64_t step) {
  torch::manual_seed(100 + static_cast<uint64_t>(step));
  Tensor real = torch::full({kItems, 1, 32, 32}, -1.0);
  const Tensor corners = torch::randint(0, 20, {kItems, 2});
  for (int64_t i = 0; i < kItems; ++i) {
    real[i][0].narrow(0, corners[i][0].item<int64_t>(), 12).narrow(1, corners[i][1].item<int64_t>(), 12).fill_(1);
  }
  return {real, torch::randn({kItems, kNoise, 1, 1})};
}

struct Trained {
  std::vector<Tensor> tensors;
  std::vector<double> losses;
  snug::Bytes peak{0};  // of everything that the loop allocates
};

Trained result_of(const Gan& gan, const snug::MemoryMeter& meter, const std::vector<double>& losses) {
  Trained trained{gan->parameters(), losses, snug::Bytes(meter.report().peak_bytes)};
  for (const Tensor& buffer : gan->buffers()) {
    trained.tensors.push_back(buffer);
  }
  return trained;
}

// loop: plain
Trained train_plainly() {
  torch::manual_seed(1);
  const snug::MemoryMeter meter;
  Gan gan;
  Adam of_generator(gan->generator->parameters(), AdamOptions(kRateOfGenerator));
  Adam of_discriminator(gan->discriminator->parameters(), AdamOptions(kRateOfDiscriminator));
  std::vector<double> sums;
  for (int64_t step = 0; step < kSteps; ++step) {
    const snug::Batch batch = batch_of(step);
    of_generator.zero_grad();
    of_discriminator.zero_grad();
    const Losses of = losses(gan, batch[0], batch[1]);
    const Tensor sum = of.of_generator + of.of_discriminator;
    sum.backward();
    of_generator.step();
    of_discriminator.step();
    sums.push_back(sum.item<double>());
  }
  return result_of(gan, meter, sums);
}

// loop: snug
Trained train_within(snug::Bytes budget) {
  torch::manual_seed(1);
  const snug::MemoryMeter meter;
  Gan gan;
  Adam of_generator(gan->generator->parameters(), AdamOptions(kRateOfGenerator));
  Adam of_discriminator(gan->discriminator->parameters(), AdamOptions(kRateOfDiscriminator));
  snug::Stepper stepper(gan, {&of_generator, &of_discriminator}, {.budget = {.memory = budget}});
  std::vector<double> sums;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto result = stepper.step(batch_of(step), [&](const snug::Batch& batch) {
      const Losses of = losses(gan, batch[0], batch[1]);
      return snug::Loss::mean(of.of_generator + of.of_discriminator, batch.size());
    });
    sums.push_back(result.loss());
  }
  return result_of(gan, meter, sums);
}
// loop: end

}  // namespace

int main() {
  const Trained plain = train_plainly();
  const Trained planned = train_within(snug::live_bytes(torch::kCPU) + plain.peak * kShare);
  const bool same = planned.losses == plain.losses &&
                    std::ranges::equal(planned.tensors, plain.tensors, [](auto& a, auto& b) { return a.equal(b); });
  std::cout << "gan: plain peak " << plain.peak.str() << ", planned peak " << planned.peak.str()
            << (same ? ", the same bits" : ", other bits") << "\n";
  return same && planned.peak <= plain.peak * kShare ? 0 : 1;
}
