// A picture made of soft points, as in Gaussian splatting: no module, one Adam for each tensor, and points that are
// split and pruned between steps. The plain loop, and the same loop by one Stepper within 60 % of the plain loop's
// memory: the same bits.

#include <algorithm>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::Tensor;
using torch::optim::Adam;
using torch::optim::AdamOptions;

constexpr int64_t kPoints = 300, kSide = 48, kTiles = 8, kSteps = 12, kStepsBetween = 4;
constexpr double kShare = 0.6;

// One row for each point. Each tensor has an Adam with a rate of its own.
struct Scene {
  Scene() {
    torch::manual_seed(1);
    add(torch::rand({kPoints, 2}), 2e-3);        // places
    add(torch::full({kPoints, 1}, -3.0), 1e-2);  // logarithms of the sizes
    add(torch::full({kPoints, 1}, -1.0), 5e-2);  // opacities, before the sigmoid
    add(torch::rand({kPoints, 3}) - 0.5, 2e-2);  // colours, before the sigmoid
  }
  void add(const Tensor& tensor, double rate) {
    tensors.push_back(tensor.requires_grad_());
    optimizers.push_back(std::make_unique<Adam>(std::vector{tensor}, AdamOptions(rate)));
  }
  std::vector<torch::optim::Optimizer*> all_optimizers() const {
    std::vector<torch::optim::Optimizer*> all;
    for (const auto& optimizer : optimizers) {
      all.push_back(optimizer.get());
    }
    return all;
  }

  std::vector<Tensor> tensors;
  std::vector<std::unique_ptr<Adam>> optimizers;
};

// The weight of each point in each pixel, then the mean of the colours, tile by tile. `h` is assigned again and again,
// because a name for each result would keep all results until the end.
Tensor picture_of(const Scene& scene, const Tensor& pixels) {
  const std::vector<Tensor>& of = scene.tensors;
  std::vector<Tensor> tiles;
  for (const Tensor& tile : pixels.chunk(kTiles)) {
    Tensor h = torch::cdist(tile, of[0], 2, /*compute_mode=*/2);
    h = h * (-of[1]).exp().t();
    h = h.square();
    h = (h * -0.5).exp();
    h = h * of[2].sigmoid().t();
    tiles.push_back(h.matmul(of[3].sigmoid()) / (h.sum(1, /*keepdim=*/true) + 1e-3));
  }
  return torch::cat(tiles);
}

// Points whose place has the largest gradients become two, and points that hardly show go. New tensors take the places
// of the old ones in the scene and in the optimizers, and Adam's averages go along.
void split_and_prune(Scene& scene) {
  const torch::NoGradGuard no_grad;
  const Tensor pull = scene.tensors[0].grad().norm(2, 1);
  const Tensor kept = (scene.tensors[2].squeeze(1) > -1.2).nonzero().squeeze(1);
  const Tensor split = (pull > pull.quantile(0.7)).nonzero().squeeze(1);
  const Tensor rows = torch::cat({kept, split});
  for (size_t i = 0; i < scene.tensors.size(); ++i) {
    Adam& optimizer = *scene.optimizers[i];
    Tensor& tensor = scene.tensors[i];
    auto state = std::move(optimizer.state().at(tensor.unsafeGetTensorImpl()));
    optimizer.state().erase(tensor.unsafeGetTensorImpl());
    auto& averages = static_cast<torch::optim::AdamParamState&>(*state);
    averages.exp_avg(averages.exp_avg().index_select(0, rows));
    averages.exp_avg_sq(averages.exp_avg_sq().index_select(0, rows));
    tensor = tensor.detach().index_select(0, rows).requires_grad_();
    optimizer.param_groups()[0].params()[0] = tensor;
    optimizer.state()[tensor.unsafeGetTensorImpl()] = std::move(state);
  }
  scene.tensors[0].slice(0, kept.size(0)).add_(torch::randn({split.size(0), 2}), 0.01);
}

// All pixels, and the picture to be made: rings of colours.
snug::Batch target() {
  const Tensor at = torch::linspace(0, 1, kSide);
  const Tensor pixels = torch::stack({at.repeat_interleave(kSide), at.repeat({kSide})}, 1);
  const Tensor distance = (pixels - 0.5).norm(2, 1);
  return {pixels, torch::stack({(distance * 30).sin(), (distance * 20).cos(), pixels.select(1, 0)}, 1) * 0.5 + 0.5};
}

struct Trained {
  std::vector<Tensor> tensors;
  std::vector<double> losses;
  snug::Bytes peak{0};  // of everything that the loop allocates
};

// loop: plain
Trained train_plainly() {
  const snug::MemoryMeter meter;
  Scene scene;
  const snug::Batch batch = target();
  std::vector<double> losses;
  for (int64_t step = 1; step <= kSteps; ++step) {
    for (const auto& optimizer : scene.optimizers) {
      optimizer->zero_grad();
    }
    const Tensor loss = torch::mse_loss(picture_of(scene, batch[0]), batch[1]);
    loss.backward();
    for (const auto& optimizer : scene.optimizers) {
      optimizer->step();
    }
    losses.push_back(loss.item<double>());
    if (step % kStepsBetween == 0) {
      split_and_prune(scene);
    }
  }
  return {scene.tensors, losses, snug::Bytes(meter.report().peak_bytes)};
}

// loop: snug
Trained train_within(snug::Bytes budget) {
  const snug::MemoryMeter meter;
  Scene scene;
  const snug::Batch batch = target();
  snug::Stepper stepper(scene.tensors, scene.all_optimizers(), {.budget = {.memory = budget}});
  std::vector<double> losses;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const auto result = stepper.step(batch, [&](const snug::Batch& whole) {
      return snug::Loss::whole(torch::mse_loss(picture_of(scene, whole[0]), whole[1]));
    });
    losses.push_back(result.loss());
    if (step % kStepsBetween == 0) {
      split_and_prune(scene);
    }
  }
  return {scene.tensors, losses, snug::Bytes(meter.report().peak_bytes)};
}
// loop: end

}  // namespace

int main() {
  const Trained plain = train_plainly();
  const Trained planned = train_within(snug::live_bytes(torch::kCPU) + plain.peak * kShare);
  const bool same = planned.losses == plain.losses &&
                    std::ranges::equal(planned.tensors, plain.tensors, [](auto& a, auto& b) { return a.equal(b); });
  std::cout << "points: plain peak " << plain.peak.str() << ", planned peak " << planned.peak.str()
            << (same ? ", the same bits" : ", other bits") << ", " << kPoints << " points became "
            << plain.tensors[0].size(0) << "\n";
  return same && plain.tensors[0].size(0) > kPoints && planned.peak <= plain.peak * kShare ? 0 : 1;
}
