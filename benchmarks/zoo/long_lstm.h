#pragma once
// An LSTM cell in a loop, as one writes it where each step does something of its own: many small operators. Each step's
// hidden state counts in the loss.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

struct LongLstm : torch::nn::Module {
  explicit LongLstm(int64_t width)
      : cell(register_module("cell", torch::nn::LSTMCell(width, width))),
        head(register_module("head", torch::nn::Linear(width, width))) {}

  torch::nn::LSTMCell cell;
  torch::nn::Linear head;
};

inline Entry make_long_lstm() {
  constexpr int64_t kSteps = 1000, kItems = 16, kWidth = 64;
  torch::manual_seed(1);
  const auto net = std::make_shared<LongLstm>(kWidth);
  return {"long_lstm", net, {torch::randn({kItems, kSteps, kWidth})}, [net](const Batch& batch, const Run& run) {
            Parts parts;
            for (int64_t t = 0; t < kSteps; ++t) {
              parts.emplace_back([net, t, x = batch[0]](const State& state) -> State {
                const auto [h, c] = net->cell->forward(x.select(1, t), std::make_tuple(state[0], state[1]));
                return {h, c, state[2] + net->head->forward(h).square().mean() / kSteps};
              });
            }
            const Tensor zeros = torch::zeros({batch[0].size(0), kWidth});
            return run(parts, {zeros, zeros, torch::zeros({})})[2];
          }};
}

}  // namespace snug::zoo
