#pragma once
// NeRF (Mildenhall et al. 2020): two fields and volume rendering along rays; the fine field's places are drawn where
// the coarse one sees something.

#include <cmath>
#include <numbers>

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

/// x and sines and cosines of x times powers of two, in the last dimension.
inline Tensor positional_encoding(const Tensor& x, int64_t octaves) {
  std::vector<Tensor> waves{x};
  for (int64_t i = 0; i < octaves; ++i) {
    const Tensor scaled = x * (std::pow(2.0, i) * std::numbers::pi);
    waves.push_back(torch::sin(scaled));
    waves.push_back(torch::cos(scaled));
  }
  return torch::cat(waves, -1);
}

class RadianceFieldImpl : public torch::nn::Module {
 public:
  explicit RadianceFieldImpl(int64_t width)
      : view_(register_module("view", torch::nn::Linear(width + kOfDirection, width / 2))),
        density_(register_module("density", torch::nn::Linear(width, 1))),
        colour_(register_module("colour", torch::nn::Linear(width / 2, 3))) {
    for (int64_t i = 0; i < kLayers; ++i) {
      const int64_t in = i == 0 ? kOfPlace : i == kSkip ? width + kOfPlace : width;
      layers_.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(in, width)));
    }
  }

  /// Densities (ray, sample) and colours (ray, sample, 3) at places, as seen in the rays' directions.
  std::pair<Tensor, Tensor> forward(const Tensor& places, const Tensor& directions) {
    const Tensor encoded = positional_encoding(places, kPlaceOctaves);
    Tensor h = encoded;
    for (int64_t i = 0; i < kLayers; ++i) {
      h = i == kSkip ? torch::cat({h, encoded}, -1) : h;
      h = torch::relu(layers_[static_cast<size_t>(i)]->forward(h));
    }
    const Tensor density = torch::relu(density_->forward(h)).squeeze(-1);
    const Tensor seen_from =
        positional_encoding(directions, kDirectionOctaves).unsqueeze(1).expand({-1, h.size(1), -1});
    return {density, torch::sigmoid(colour_->forward(torch::relu(view_->forward(torch::cat({h, seen_from}, -1)))))};
  }

 private:
  static constexpr int64_t kLayers = 6, kSkip = 3, kPlaceOctaves = 10, kDirectionOctaves = 4;
  static constexpr int64_t kOfPlace = 3 + 6 * kPlaceOctaves, kOfDirection = 3 + 6 * kDirectionOctaves;
  torch::nn::Linear view_, density_, colour_;
  std::vector<torch::nn::Linear> layers_;
};
TORCH_MODULE(RadianceField);

class NerfImpl : public torch::nn::Module {
 public:
  explicit NerfImpl(int64_t width)
      : coarse_(register_module("coarse", RadianceField(width))),
        fine_(register_module("fine", RadianceField(width))) {}

  /// origins, directions, colours: (ray, 3).
  Tensor loss(const Tensor& origins, const Tensor& directions, const Tensor& colours) {
    const Tensor strata = torch::linspace(kNear, kFar, kCoarse + 1);
    const Tensor depths = strata.slice(0, 0, -1) + torch::rand({origins.size(0), kCoarse}) * (kFar - kNear) / kCoarse;
    const auto [coarse_colours, weights] = render(coarse_, origins, directions, depths);
    const Tensor all_depths = std::get<0>(torch::sort(torch::cat({depths, important(depths, weights)}, 1), 1));
    const auto [fine_colours, unused] = render(fine_, origins, directions, all_depths);
    return (coarse_colours - colours).square().mean() + (fine_colours - colours).square().mean();
  }

 private:
  // Colours of the rays, and the samples' weights in them.
  static std::pair<Tensor, Tensor> render(RadianceField& field, const Tensor& origins, const Tensor& directions,
                                          const Tensor& depths) {
    const auto [density, colour] =
        field->forward(origins.unsqueeze(1) + directions.unsqueeze(1) * depths.unsqueeze(2), directions);
    const Tensor distances = torch::cat({depths.diff(), torch::full({depths.size(0), 1}, 1e3)}, 1);
    const Tensor opacity = 1 - torch::exp(-density * distances);
    const Tensor clear = torch::cat({torch::ones({depths.size(0), 1}), 1 - opacity.slice(1, 0, -1) + 1e-10}, 1);
    const Tensor weights = opacity * torch::cumprod(clear, 1);
    return {(weights.unsqueeze(2) * colour).sum(1), weights};
  }

  // Depths, drawn from the distribution that the weights are.
  static Tensor important(const Tensor& depths, const Tensor& weights) {
    const torch::NoGradGuard no_grad;
    const Tensor density = weights + 1e-5;
    const Tensor cumulative = torch::cumsum(density / density.sum(1, /*keepdim=*/true), 1);
    const Tensor drawn = torch::rand({depths.size(0), kFine});
    const Tensor right = torch::searchsorted(cumulative, drawn).clamp(1, kCoarse - 1);
    const Tensor low = cumulative.gather(1, right - 1), high = cumulative.gather(1, right);
    const Tensor share = ((drawn - low) / (high - low).clamp_min(1e-5)).clamp(0, 1);
    return torch::lerp(depths.gather(1, right - 1), depths.gather(1, right), share);
  }

  static constexpr int64_t kCoarse = 32, kFine = 32;
  static constexpr double kNear = 2, kFar = 6;
  RadianceField coarse_, fine_;
};
TORCH_MODULE(Nerf);

inline Entry make_nerf() {
  constexpr int64_t kRays = 256;
  torch::manual_seed(1);
  Nerf model(/*width=*/64);
  const Tensor origins = torch::randn({kRays, 3});
  const Tensor directions = torch::nn::functional::normalize(torch::randn({kRays, 3}));
  return {"nerf",
          model.ptr(),
          {origins, directions, torch::rand({kRays, 3})},
          [model](const Batch& batch, const Run&) mutable { return model->loss(batch[0], batch[1], batch[2]); }};
}

}  // namespace snug::zoo
