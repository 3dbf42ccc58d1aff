#pragma once
// Captions for images, as in "Show, Attend and Tell" (Xu et al. 2015): a convolutional encoder, then an LSTM cell over
// the words, with attention over the encoder's places.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

class CaptioningImpl : public torch::nn::Module {
 public:
  CaptioningImpl(int64_t vocab, int64_t width)
      : width_(width),
        encoder_(register_module("encoder", encoder(width))),
        words_(register_module("words", torch::nn::Embedding(vocab, width))),
        keys_(register_module("keys", torch::nn::Linear(width, width))),
        query_(register_module("query", torch::nn::Linear(width, width))),
        score_(register_module("score", torch::nn::Linear(width, 1))),
        cell_(register_module("cell", torch::nn::LSTMCell(2 * width, width))),
        logits_(register_module("logits", torch::nn::Linear(2 * width, vocab))) {}

  Tensor loss(const Tensor& images, const Tensor& captions, const Run& run) {
    const Tensor places = encoder_->forward(images).flatten(2).transpose(1, 2);  // item, place, channel
    const Tensor zeros = torch::zeros({images.size(0), width_});
    const int64_t steps = captions.size(1) - 1;
    Parts parts;
    for (int64_t t = 0; t < steps; ++t) {
      parts.emplace_back([this, t, captions](const State& state) { return word(state, captions, t); });
    }
    return run(parts, {zeros, zeros, torch::zeros({}), places, keys_->forward(places)})[2] / steps;
  }

 private:
  static torch::nn::Sequential encoder(int64_t width) {
    torch::nn::Sequential layers;
    int64_t in = 3;
    for (const int64_t out : {width / 4, width / 2, width}) {
      layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).stride(2).padding(1).bias(false)));
      layers->push_back(torch::nn::BatchNorm2d(out));
      layers->push_back(torch::nn::ReLU());
      in = out;
    }
    return layers;
  }

  State word(const State& state, const Tensor& captions, int64_t t) {
    const Tensor &places = state[3], &keys = state[4];
    const Tensor scores = score_->forward(torch::tanh(keys + query_->forward(state[0]).unsqueeze(1)));
    const Tensor context = (torch::softmax(scores, 1) * places).sum(1);
    const Tensor in = torch::cat({words_->forward(captions.select(1, t)), context}, 1);
    const auto [h, c] = cell_->forward(in, std::make_tuple(state[0], state[1]));
    const Tensor logits = logits_->forward(torch::cat({torch::dropout(h, 0.5, is_training()), context}, 1));
    const Tensor loss = torch::nn::functional::cross_entropy(logits, captions.select(1, t + 1));
    return {h, c, state[2] + loss, places, keys};
  }

  int64_t width_;
  torch::nn::Sequential encoder_;
  torch::nn::Embedding words_;
  torch::nn::Linear keys_, query_, score_;
  torch::nn::LSTMCell cell_;
  torch::nn::Linear logits_;
};
TORCH_MODULE(Captioning);

inline Entry make_captioning() {
  constexpr int64_t kVocab = 1000, kWords = 24, kItems = 16;
  torch::manual_seed(1);
  Captioning model(kVocab, /*width=*/128);
  const Tensor images = torch::randn({kItems, 3, 64, 64});
  const Tensor captions = torch::randint(kVocab, {kItems, kWords + 1});
  return {"captioning", model.ptr(), {images, captions}, [model](const Batch& batch, const Run& run) mutable {
            return model->loss(batch[0], batch[1], run);
          }};
}

}  // namespace snug::zoo
