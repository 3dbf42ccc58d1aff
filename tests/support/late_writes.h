#pragma once
// Small models that write to memory after autograd has saved it, in ways that autograd does not count: what is saved
// has these writes, too.
//
//   for (const LateWrites& model : late_writes()) {
//     torch::manual_seed(1);
//     model.loss().backward();
//   }

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace snug::testing {

struct LateWrites {
  std::string name;
  std::vector<torch::Tensor> leaves;
  std::function<torch::Tensor()> loss;  ///< draws random numbers
};

/// Recurrent layers, whose cells write the parts of one unsafe_chunk one after the other, each with a counter of its
/// own; RReLU, whose noise is saved before its kernel fills it; and writes through data().
inline std::vector<LateWrites> late_writes() {
  namespace nn = torch::nn;
  using torch::Tensor;
  torch::manual_seed(11);
  constexpr int64_t kTime = 5, kBatch = 16, kInput = 24, kHidden = 20;
  const Tensor sequence = torch::randn({kTime, kBatch, kInput});
  const Tensor items = torch::randn({kBatch, kInput});
  std::vector<LateWrites> all;
  const auto add = [&](std::string name, std::vector<Tensor> leaves, std::function<Tensor()> loss) {
    all.push_back({std::move(name), std::move(leaves), std::move(loss)});
  };

  nn::GRU gru(nn::GRUOptions(kInput, kHidden).num_layers(2).bidirectional(true));
  add("GRU", gru->parameters(), [=]() mutable { return std::get<0>(gru->forward(sequence)).square().mean(); });
  nn::LSTM projected(nn::LSTMOptions(kInput, kHidden).proj_size(7));
  add("LSTM with projections", projected->parameters(),
      [=]() mutable { return std::get<0>(projected->forward(sequence)).square().mean(); });
  nn::LSTM wide(nn::LSTMOptions(kInput, kHidden));
  wide->to(torch::kDouble);
  add("LSTM in FP64", wide->parameters(),
      [=]() mutable { return std::get<0>(wide->forward(sequence.to(torch::kDouble))).square().mean(); });
  nn::LSTM lstm(nn::LSTMOptions(kInput, kHidden));
  add("LSTM of packed sequences", lstm->parameters(), [=]() mutable {
    const Tensor lengths = torch::arange(kBatch).remainder(kTime).add(1);
    const auto packed = nn::utils::rnn::pack_padded_sequence(sequence, lengths, false, /*enforce_sorted=*/false);
    return std::get<0>(lstm->forward_with_packed_input(packed)).data().square().mean();
  });
  nn::GRUCell gru_cell(kInput, kHidden);
  add("GRUCell", gru_cell->parameters(), [=]() mutable {
    const Tensor once = gru_cell->forward(items);
    return gru_cell->forward(items, once).square().mean();
  });
  nn::LSTMCell lstm_cell(kInput, kHidden);
  add("LSTMCell", lstm_cell->parameters(), [=]() mutable {
    const auto once = lstm_cell->forward(items);
    return std::get<0>(lstm_cell->forward(items, once)).square().mean();
  });

  nn::Linear linear(kInput, kHidden);
  add("RReLU", linear->parameters(),
      [=]() mutable { return torch::rrelu(linear->forward(items), 0.1, 0.4, /*training=*/true).square().mean(); });
  add("RReLU in place", linear->parameters(), [=]() mutable {
    Tensor hidden = linear->forward(items);
    return torch::rrelu_(hidden, 0.1, 0.4, /*training=*/true).square().mean();
  });

  const Tensor x = torch::rand({64, 64}).requires_grad_();
  add("data() between two saves", {x}, [=] {
    const Tensor y = x * 2;
    const Tensor first = y.sin();
    y.data().mul_(0.5);
    return (first * y.cos()).sum();
  });
  add("data() after the save", {x}, [=] {
    const Tensor y = x * 2;
    const Tensor result = y.sin().sum();
    y.data().mul_(0.5);
    return result;
  });
  add("parts of a chunk", {x}, [=] {
    const auto parts = (x * 2).unsafe_chunk(3, 1);
    return (parts[0].sigmoid_() * parts[1].sigmoid_().sin() + parts[2].tanh_().slice(1, 0, 20).sum()).sum();
  });
  return all;
}

}  // namespace snug::testing
