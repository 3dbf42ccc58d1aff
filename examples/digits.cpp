// A whole program: pictures of digits through a loader with workers, a ResNet, a schedule, averaged weights,
// validation, and snapshots from which a run that was stopped goes on to the same bits. docs/start.md shows it.
//
//   digits FOLDER-OF-IDX-FILES RUN-FOLDER [STEPS] [EPOCHS]       `-` as the first: made-up pictures, for a test

#include "program/datasets/digits.h"

#include <cstdlib>
#include <iostream>
#include <string>

#include <snug/snug.h>

#include "program/models/resnet.h"

namespace {

using torch::Tensor;
namespace fs = std::filesystem;

constexpr int64_t kBatch = 64, kHeldOut = 128;

snug::Digits read_pictures(const std::string& folder) {
  if (folder != "-") {
    return snug::load_digits(folder);
  }
  const Tensor labels = torch::arange(512) % 10;  // a bar in one of ten places is the digit
  Tensor images = 0.3 * torch::rand({512, 1, 14, 14});
  for (int64_t i = 0; i < 512; ++i) {
    const int64_t digit = labels[i].item<int64_t>();
    images[i][0][1 + 3 * (digit / 2)].narrow(0, digit % 2 == 0 ? 1 : 8, 5).fill_(1);
  }
  return {images, labels};
}

// Each picture is shifted by up to a pixel, by the item's own seed: the same after a restart.
snug::ItemSource training_items(const snug::Digits& digits) {
  const auto pictures = snug::ItemSource::of_tensors({digits.images, digits.labels});
  return {.size = pictures.size - kHeldOut, .get = [pictures](int64_t index, uint64_t seed) {
            snug::ItemSource::Item item = pictures.get(index, seed);
            const int64_t down = static_cast<int64_t>(seed % 3) - 1, right = static_cast<int64_t>(seed / 3 % 3) - 1;
            item[0] = item[0].roll({down, right}, {1, 2});
            return item;
          }};
}

double accuracy(snug::ResNet& model, const snug::Digits& digits) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const int64_t begin = digits.images.size(0) - kHeldOut;
  const Tensor logits = model->forward(digits.images.narrow(0, begin, kHeldOut));
  model->train();
  return logits.argmax(1).eq(digits.labels.narrow(0, begin, kHeldOut)).to(torch::kFloat).mean().item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) {
    std::cerr << "usage: digits FOLDER-OF-IDX-FILES RUN-FOLDER [STEPS] [EPOCHS]\n";
    return 2;
  }
  const int64_t steps = argc > 3 ? std::atoll(argv[3]) : INT64_MAX, epochs = argc > 4 ? std::atoll(argv[4]) : 5;
  torch::manual_seed(1);
  const snug::Digits digits = read_pictures(argv[1]);
  snug::Loader loader(training_items(digits), {.batch = kBatch, .seed = 7, .workers = 2, .ahead = 2});

  snug::ResNet model(snug::ResNetOptions{.depth = 8, .widths = {8, 16, 32}, .in_channels = 1});
  snug::SGD optimizer(model->parameters(), {.lr = 0.1, .momentum = 0.9, .weight_decay = 1e-4});
  const snug::WarmupCosine schedule{
      .peak = 0.1, .warmup_steps = loader.batches() / 2, .total_steps = epochs * loader.batches()};
  snug::Ema ema(model->parameters(), {.decay = 0.99, .warm_up = true});
  snug::Stepper stepper(model, optimizer, {.clip_norm = 1.0});

  snug::SnapshotStore snapshots(fs::path(argv[2]) / "snapshots");
  const std::map<std::string, snug::Stateful> parts{
      {"model", snug::stateful(model)},     {"optimizer", snug::stateful(optimizer)}, {"ema", snug::stateful(ema)},
      {"stepper", snug::stateful(stepper)}, {"loader", snug::stateful(loader)},       {"random", snug::stateful_rng()}};
  int64_t step = snapshots.load_latest(parts).value_or(0);
  if (step > 0) {
    std::cout << "resumed after step " << step << "\n";
  }

  for (int64_t made = 0; made < steps && loader.epoch() < epochs;) {
    const auto batch = loader.next();
    if (!batch) {
      const snug::Ema::Scope averaged(ema);
      // The running statistics are those of the trained weights; the averages need their own.
      snug::precise_batch_norm(*model, [&] { model->forward(digits.images.narrow(0, 0, 4 * kBatch)); });
      std::cout << "epoch " << loader.epoch() << ": held-out accuracy " << accuracy(model, digits) << "\n";
      continue;
    }
    optimizer.param_groups()[0].options().set_lr(schedule.at(step));
    const auto result = stepper.step(snug::Batch(*batch), [&](const snug::Batch& micro) {
      return snug::Loss::mean(torch::nn::functional::cross_entropy(model->forward(micro[0]), micro[1]), micro.size());
    });
    ema.update();
    ++step;
    ++made;
    if (step % 5 == 0) {
      snapshots.save(step, parts);
      std::cout << "step " << step << "  loss " << result.loss() << "\n";
    }
  }
  double sum = 0;
  for (const Tensor& average : ema.averages()) {
    sum += average.to(torch::kDouble).abs().sum().item<double>();
  }
  std::cout.precision(17);
  std::cout << "averaged weights " << sum << "\ndigits: done\n";
} catch (const std::exception& error) {
  std::cerr << "digits: " << error.what() << "\n";
  return 1;
}
