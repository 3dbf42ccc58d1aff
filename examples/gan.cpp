// Two models in one step: a generator and its discriminator, each with options of its own, share one forward pass of
// the generator. Beside it stands the plain loop with two optimizers, which has the same bits, within a number of bytes
// as well.

#include <algorithm>
#include <iostream>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kItems = 1024, kNoise = 8, kWidth = 128, kSteps = 5;
constexpr double kRateOfGenerator = 1e-3, kRateOfDiscriminator = 4e-3;

struct GanImpl : nn::Module {
  GanImpl() {
    generator =
        register_module("generator", nn::Sequential(nn::Linear(kNoise, kWidth), nn::GELU(), nn::Linear(kWidth, kWidth),
                                                    nn::GELU(), nn::Linear(kWidth, 2)));
    discriminator =
        register_module("discriminator", nn::Sequential(nn::Linear(2, kWidth), nn::GELU(), nn::Linear(kWidth, kWidth),
                                                        nn::GELU(), nn::Linear(kWidth, 1)));
  }
  nn::Sequential generator{nullptr}, discriminator{nullptr};
};
TORCH_MODULE(Gan);

void freeze(nn::Sequential& model, bool frozen) {
  for (const Tensor& parameter : model->parameters()) {
    parameter.set_requires_grad(!frozen);
  }
}

struct Losses {
  Tensor of_generator, of_discriminator;
};

// Of one forward pass of the generator. Each model's loss has gradients for that model alone.
Losses losses(Gan& gan, const Tensor& real, const Tensor& noise) {
  const auto says = [&gan](const Tensor& points, bool is_real) {
    const Tensor logits = gan->discriminator->forward(points);
    return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, is_real ? 1.0 : 0.0));
  };
  const Tensor made = gan->generator->forward(noise);
  freeze(gan->discriminator, true);
  const Tensor of_generator = says(made, true);
  freeze(gan->discriminator, false);
  return {of_generator, says(real, true) + says(made.detach(), false)};
}

snug::Batch batch_of(int64_t step) {
  torch::manual_seed(100 + static_cast<uint64_t>(step));
  const Tensor angle = torch::rand({kItems}) * 6.28;
  return {torch::stack({angle.cos(), angle.sin()}, 1), torch::randn({kItems, kNoise})};
}

struct Trained {
  std::vector<Tensor> parameters;
  std::vector<double> losses;
  double loss_of_discriminator = 0;
  int64_t peak_bytes = 0;

  bool operator==(const Trained& other) const {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!torch::equal(parameters[i], other.parameters[i])) {
        return false;
      }
    }
    return losses == other.losses;
  }
};

// Two optimizers, two backward passes.
Trained train_plainly(int64_t micro_batch) {
  torch::manual_seed(1);
  Gan gan;
  snug::AdamW of_generator(gan->generator->parameters(), {.lr = kRateOfGenerator});
  snug::AdamW of_discriminator(gan->discriminator->parameters(), {.lr = kRateOfDiscriminator});
  Trained trained;
  for (int64_t step = 0; step < kSteps; ++step) {
    of_generator.zero_grad();
    of_discriminator.zero_grad();
    double sum = 0;
    for (const snug::Batch& micro : snug::micro_batches(batch_of(step), micro_batch)) {
      const double share = static_cast<double>(micro.size()) / kItems;
      const Losses of = losses(gan, micro[0], micro[1]);
      (of.of_generator * share).backward();
      (of.of_discriminator * share).backward();
      sum += (of.of_generator + of.of_discriminator).item<double>() * share;
    }
    of_generator.step();
    of_discriminator.step();
    trained.losses.push_back(sum);
  }
  trained.parameters = gan->parameters();
  return trained;
}

// One Stepper with an optimizer for each model, and the sum of the losses.
Trained train_by_stepper(int64_t micro_batch, snug::Bytes budget) {
  torch::manual_seed(1);
  Gan gan;
  snug::AdamW of_generator(gan->generator->parameters(), {.lr = kRateOfGenerator});
  snug::AdamW of_discriminator(gan->discriminator->parameters(), {.lr = kRateOfDiscriminator});
  snug::Stepper stepper(gan, {&of_generator, &of_discriminator},
                        {.micro_batch = micro_batch, .budget = {.memory = budget}});
  Trained trained;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto result = stepper.step(batch_of(step), [&](const snug::Batch& micro) {
      const Losses of = losses(gan, micro[0], micro[1]);
      return snug::Loss::mean(of.of_generator + of.of_discriminator, micro.size())
          .with("discriminator", of.of_discriminator);
    });
    trained.losses.push_back(result.loss());
    trained.loss_of_discriminator = result.metric("discriminator");
    trained.peak_bytes = std::max(trained.peak_bytes, result.peak_bytes);
  }
  trained.parameters = gan->parameters();
  return trained;
}

}  // namespace

int main() {
  for (const int64_t micro_batch : {kItems, kItems / 4}) {
    const Trained plain = train_plainly(micro_batch);
    const Trained stepped = train_by_stepper(micro_batch, snug::Bytes::unlimited());
    const snug::Bytes budget(stepped.peak_bytes * 9 / 10);
    const Trained planned = train_by_stepper(micro_batch, budget);
    std::cout << "micro-batches of " << micro_batch << ": loss " << stepped.losses.back() << ", of the discriminator "
              << stepped.loss_of_discriminator << ", peak " << snug::Bytes(stepped.peak_bytes).str()
              << ", within a budget " << snug::Bytes(planned.peak_bytes).str() << "\n";
    if (!(stepped == plain && planned == plain && planned.peak_bytes <= budget.count())) {
      std::cout << "these are not the bits of the plain loop, or not within the budget\n";
      return 1;
    }
  }
  std::cout << "gan: done\n";
}
