#pragma once
// U-Net (Ronneberger et al. 2015) with GroupNorm: a way down, a way up, and skips between them.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

class UNetImpl : public torch::nn::Module {
 public:
  UNetImpl(int64_t width, int64_t levels, int64_t classes)
      : classes_(register_module("classes", torch::nn::Conv2d(torch::nn::Conv2dOptions(width, classes, 1)))) {
    for (int64_t level = 0; level < levels; ++level) {
      const int64_t out = width << level, in = level == 0 ? 3 : out / 2;
      down_.push_back(register_module("down" + std::to_string(level), two_convolutions(in, out)));
      if (level > 0) {
        const auto widen = torch::nn::ConvTranspose2dOptions(out, out / 2, 2).stride(2);
        widen_.push_back(register_module("widen" + std::to_string(level), torch::nn::ConvTranspose2d(widen)));
        up_.push_back(register_module("up" + std::to_string(level), two_convolutions(out, out / 2)));
      }
    }
  }

  Tensor forward(const Tensor& images) {
    std::vector<Tensor> skips{down_[0]->forward(images)};
    for (size_t level = 1; level < down_.size(); ++level) {
      skips.push_back(down_[level]->forward(torch::max_pool2d(skips.back(), 2)));
    }
    Tensor h = skips.back();
    for (size_t level = up_.size(); level-- > 0;) {
      h = up_[level]->forward(torch::cat({skips[level], widen_[level]->forward(h)}, 1));
    }
    return classes_->forward(h);
  }

 private:
  static torch::nn::Sequential two_convolutions(int64_t in, int64_t out) {
    torch::nn::Sequential layers;
    for (const int64_t from : {in, out}) {
      layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(from, out, 3).padding(1)));
      layers->push_back(torch::nn::GroupNorm(torch::nn::GroupNormOptions(8, out)));
      layers->push_back(torch::nn::ReLU());
    }
    return layers;
  }

  torch::nn::Conv2d classes_;
  std::vector<torch::nn::Sequential> down_, up_;
  std::vector<torch::nn::ConvTranspose2d> widen_;
};
TORCH_MODULE(UNet);

inline Entry make_unet() {
  constexpr int64_t kImages = 6, kSize = 64, kClasses = 4;
  torch::manual_seed(1);
  UNet model(/*width=*/16, /*levels=*/4, kClasses);
  const Tensor images = torch::randn({kImages, 3, kSize, kSize});
  const Tensor labels = torch::randint(kClasses, {kImages, kSize, kSize});
  return {"unet", model.ptr(), {images, labels}, [model](const Batch& batch, const Run&) mutable {
            return torch::nn::functional::cross_entropy(model->forward(batch[0]), batch[1]);
          }};
}

}  // namespace snug::zoo
