#pragma once
// Ways to run a deep chain of GPT blocks, and what each takes: the bytes at the peak, and how often a block was called.
//
//   const auto cost = measure(kTechniques[1], /*depth=*/24);

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "program/models/gpt.h"
#include "snug/checkpoint.h"
#include "snug/extra/reversible.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/sliced.h"
#include "tests/support/tensors.h"

namespace snug::testing {

using Layer = std::function<Tensor(Tensor)>;

/// Recomputes halves, and in these halves their halves: about log2(n) inputs are alive at a time.
inline Tensor nested_checkpoints(const std::vector<Layer>& layers, size_t begin, size_t end, Tensor x) {
  if (end - begin == 1) {
    return checkpoint(layers[begin], x);
  }
  const size_t middle = (begin + end) / 2;
  for (const auto& [from, to] : {std::pair{begin, middle}, {middle, end}}) {
    x = checkpoint([=](const Tensor& h) { return nested_checkpoints(layers, from, to, h); }, x);
  }
  return x;
}

struct Chain {
  std::vector<Layer> layers;                    // GPT blocks, which count their calls
  std::vector<std::pair<Layer, Layer>> halves;  // attention and MLP of each, without the residual additions
};

struct Technique {
  std::string name;
  std::function<Tensor(const Chain&, Tensor)> run;
  bool offloads = false;
};

inline Tensor run_in_segments(const Chain& chain, int64_t segments, const Tensor& x) {
  return checkpoint_sequential(chain.layers, segments, x, LastSegment::Recompute);
}

inline Tensor run_plain(const Chain& chain, Tensor x) {
  for (const Layer& layer : chain.layers) {
    x = layer(x);
  }
  return x;
}

inline Tensor run_reversible(const Chain& chain, const Tensor& x) {
  ReversibleSequential blocks;
  for (const auto& [attention, mlp] : chain.halves) {
    blocks.push_back(attention, mlp);
  }
  const auto [a, b] = blocks.forward(x, x);
  return a + b;
}

inline const std::vector<Technique>& techniques() {
  static const std::vector<Technique> all{
      {"plain", run_plain},
      {"sqrt(n) segments",
       [](const Chain& chain, const Tensor& x) {
         const auto n = static_cast<double>(chain.layers.size());
         return run_in_segments(chain, std::lround(std::sqrt(n)), x);
       }},
      {"every block",
       [](const Chain& chain, const Tensor& x) {
         return run_in_segments(chain, static_cast<int64_t>(chain.layers.size()), x);
       }},
      {"nested",
       [](const Chain& chain, const Tensor& x) { return nested_checkpoints(chain.layers, 0, chain.layers.size(), x); }},
      {"reversible", run_reversible},
      {"offload", run_plain, /*offloads=*/true},
      {"every block, offload",
       [](const Chain& chain, const Tensor& x) {
         return run_in_segments(chain, static_cast<int64_t>(chain.layers.size()), x);
       },
       /*offloads=*/true},
  };
  return all;
}

struct DepthCost {
  int64_t peak_bytes = 0;  ///< above the level before the step, in which all gradients are there
  double calls = 0;        ///< of blocks
  std::vector<Tensor> gradients;
};

struct DepthShape {
  int64_t batch = 2, time = 32, width = 32;
  int64_t activation_bytes() const { return batch * time * width * 4; }
};

/// One forward and backward of `depth` GPT blocks without dropout.
inline DepthCost measure(const Technique& technique, int64_t depth, DepthShape shape = {}) {
  torch::manual_seed(1);
  const GptOptions options{.context = shape.time, .layers = depth, .heads = 4, .width = shape.width};
  std::vector<GptBlock> blocks;
  std::vector<Tensor> parameters;
  for (int64_t i = 0; i < depth; ++i) {
    blocks.emplace_back(options);
    for (Tensor& parameter : blocks.back()->parameters()) {
      parameter.mutable_grad() = torch::zeros_like(parameter);
      parameters.push_back(parameter);
    }
  }
  DepthCost cost;
  Chain chain;
  for (GptBlock& block : blocks) {
    chain.layers.emplace_back([block, &cost](const Tensor& x) mutable {
      cost.calls += 1;
      return block->forward(x);
    });
    chain.halves.emplace_back(
        [block, &cost](const Tensor& x) mutable {
          cost.calls += 0.5;
          return block->attention->forward(block->attention_norm->forward(x));
        },
        [block, &cost](const Tensor& x) mutable {
          cost.calls += 0.5;
          return block->mlp->forward(block->mlp_norm->forward(x));
        });
  }
  const Tensor x = torch::randn({shape.batch, shape.time, shape.width});
  const MemoryMeter meter;
  {
    std::optional<SaveOnHost> offload;
    if (technique.offloads) {
      offload.emplace(OffloadOptions{.min_bytes = Bytes(shape.activation_bytes() / 2)});
    }
    const Tensor loss = technique.run(chain, x).square().mean();
    offload.reset();
    loss.backward();
  }
  cost.peak_bytes = meter.report().peak_bytes;
  cost.gradients = gradients_of(parameters);
  return cost;
}

}  // namespace snug::testing
