#pragma once
// A graph network as in "Learning to Simulate Complex Physics with Graph Networks" (Sanchez-Gonzalez et al. 2020):
// messages along edges, added up at nodes, several times over.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

class GraphLayerImpl : public torch::nn::Module {
 public:
  explicit GraphLayerImpl(int64_t width)
      : edge_mlp_(register_module("edge_mlp", mlp(3 * width, width))),
        node_mlp_(register_module("node_mlp", mlp(2 * width, width))) {}

  /// nodes, edges: (count, width). Edge e goes from node senders[e] to receivers[e].
  State forward(const Tensor& nodes, const Tensor& edges, const Tensor& senders, const Tensor& receivers) {
    const Tensor ends = torch::cat({edges, nodes.index_select(0, senders), nodes.index_select(0, receivers)}, 1);
    const Tensor messages = edge_mlp_->forward(ends);
    const Tensor received = torch::zeros_like(nodes).index_add(0, receivers, messages);
    return {nodes + node_mlp_->forward(torch::cat({nodes, received}, 1)), edges + messages};
  }

  static torch::nn::Sequential mlp(int64_t in, int64_t width) {
    return torch::nn::Sequential(torch::nn::Linear(in, width), torch::nn::ReLU(), torch::nn::Linear(width, width),
                                 torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }

 private:
  torch::nn::Sequential edge_mlp_, node_mlp_;
};
TORCH_MODULE(GraphLayer);

class GraphNetworkImpl : public torch::nn::Module {
 public:
  GraphNetworkImpl(int64_t layers, int64_t width)
      : node_encoder_(register_module("node_encoder", GraphLayerImpl::mlp(6, width))),
        edge_encoder_(register_module("edge_encoder", GraphLayerImpl::mlp(4, width))),
        decoder_(register_module("decoder", torch::nn::Linear(width, 3))) {
    for (int64_t i = 0; i < layers; ++i) {
      layers_.push_back(register_module("layer" + std::to_string(i), GraphLayer(width)));
    }
  }

  /// batch: nodes, edges, senders, receivers, wanted accelerations.
  Tensor loss(const Batch& batch, const Run& run) {
    Parts parts;
    for (const GraphLayer& layer : layers_) {
      parts.emplace_back([layer = layer.ptr(), senders = batch[2], receivers = batch[3]](const State& state) {
        return layer->forward(state[0], state[1], senders, receivers);
      });
    }
    const State end = run(parts, {node_encoder_->forward(batch[0]), edge_encoder_->forward(batch[1])});
    return torch::mse_loss(decoder_->forward(end[0]), batch[4]);
  }

 private:
  torch::nn::Sequential node_encoder_, edge_encoder_;
  torch::nn::Linear decoder_;
  std::vector<GraphLayer> layers_;
};
TORCH_MODULE(GraphNetwork);

inline Entry make_graph_network() {
  constexpr int64_t kNodes = 1500, kEdges = 6000;
  torch::manual_seed(1);
  GraphNetwork model(/*layers=*/6, /*width=*/64);
  return {"graph_network",
          model.ptr(),
          {torch::randn({kNodes, 6}), torch::randn({kEdges, 4}), torch::randint(kNodes, {kEdges}),
           torch::randint(kNodes, {kEdges}), torch::randn({kNodes, 3})},
          [model](const Batch& batch, const Run& run) mutable { return model->loss(batch, run); },
          /*splits_over_batch=*/false};
}

}  // namespace snug::zoo
