#include "program/measure/deep_models.h"

#include <cmath>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/models/resnet.h"
#include "program/run/device.h"
#include "snug/extra/reversible.h"
#include "snug/offload.h"
#include "snug/sliced.h"

namespace snug::measure {
namespace {

using at::Tensor;

// Runs the chain in halves, each half in halves, and so on: about log2(n) inputs are alive at a time, and a layer runs
// about log2(n) times.
Tensor nested(const Layers& layers, size_t begin, size_t end, Tensor x) {
  if (end - begin == 1) {
    return checkpoint(layers[begin], std::move(x));
  }
  const size_t middle = (begin + end) / 2;
  x = checkpoint([&layers, begin, middle](Tensor h) { return nested(layers, begin, middle, std::move(h)); }, x);
  return checkpoint([&layers, middle, end](Tensor h) { return nested(layers, middle, end, std::move(h)); }, x);
}

Technique in_segments(int64_t segments, const std::string& label) {
  return {.name = "checkpoint_sequential", .label = label, .run = [segments](const DeepModel& model, const Tensor& x) {
            return checkpoint_sequential(model.layers, segments, x);
          }};
}

// Both streams begin as x, and end as their mean. Each pair is F and G of a block; a layer without a partner is left
// out.
Layer reversible_in_pairs(const Layers& halves) {
  ReversibleSequential blocks;
  for (size_t i = 0; i + 1 < halves.size(); i += 2) {
    blocks.push_back(halves[i], halves[i + 1]);
  }
  return [blocks](const Tensor& x) {
    const auto [a, b] = blocks.forward(x, x);
    return (a + b) / 2;
  };
}

// A block without the block's shortcut.
Layer branch_of(const ResNetBlock& block) {
  return [branch = block->branch](Tensor x) mutable { return branch->forward(std::move(x)); };
}

// A block that changes the shape stays unchanged, and so does a block without a partner.
Layer reversible_resnet(const ResNet& resnet, size_t blocks_a_stage) {
  Layers parts;
  for (size_t i = 0; i < resnet->blocks.size();) {
    const bool changes_shape = i > 0 && i % blocks_a_stage == 0, is_last = (i + 1) % blocks_a_stage == 0;
    if (changes_shape || is_last) {
      parts.push_back([block = resnet->blocks[i]](const Tensor& x) mutable { return block->forward(x); });
      i += 1;
    } else {
      parts.push_back(reversible_in_pairs({branch_of(resnet->blocks[i]), branch_of(resnet->blocks[i + 1])}));
      i += 2;
    }
  }
  return [parts](const Tensor& x) { return in_order(parts, x); };
}

}  // namespace

Tensor in_order(const Layers& layers, Tensor x) {
  for (const Layer& layer : layers) {
    x = layer(std::move(x));
  }
  return x;
}

Tensor each_checkpointed(const Layers& layers, Tensor x, const CheckpointOptions& options) {
  for (const Layer& layer : layers) {
    x = checkpoint(options, layer, std::move(x));
  }
  return x;
}

std::vector<Tensor> DeepModel::parameters() const { return module->parameters(); }

DeepModel deep_mlp(int64_t layers, int64_t width, int64_t batch) {
  torch::manual_seed(1);
  auto module = std::make_shared<torch::nn::SequentialImpl>();
  DeepModel model{.name = "mlp",
                  .what = fmt::format("MLP of {} layers, {} wide", layers, width),
                  .module = module,
                  .layers = {},
                  .batch = batch};
  for (int64_t i = 0; i < layers; ++i) {
    torch::nn::Linear linear(width, width);
    module->push_back(linear);
    model.layers.push_back([linear](const Tensor& x) mutable { return torch::gelu(linear->forward(x)); });
  }
  model.reversible = reversible_in_pairs(model.layers);
  model.input = [width](int64_t items) { return torch::randn({items, width}); };
  model.loss = [](const Tensor& x, const Layer& run) { return run(x).square().mean(); };
  return model;
}

DeepModel deep_gpt(int64_t layers, int64_t width, int64_t context, int64_t batch) {
  return deep_gpt(GptOptions{.context = context, .layers = layers, .heads = width / 32, .width = width}, batch);
}

DeepModel deep_gpt(const GptOptions& options, int64_t batch) {
  torch::manual_seed(1);
  Gpt gpt(options);
  const int64_t context = options.context;
  DeepModel model{
      .name = "gpt",
      .what = fmt::format("GPT of {} blocks, {} wide, {} tokens a sequence", options.layers, options.width, context),
      .module = gpt.ptr(),
      .layers = {},
      .batch = batch};
  Layers halves;
  for (GptBlock block : gpt->blocks) {
    model.layers.push_back([block](const Tensor& x) mutable { return block->forward(x); });
    halves.push_back(
        [block](const Tensor& x) mutable { return block->attention->forward(block->attention_norm->forward(x)); });
    halves.push_back([block](const Tensor& x) mutable { return block->mlp->forward(block->mlp_norm->forward(x)); });
  }
  model.reversible = reversible_in_pairs(halves);
  model.input = [vocab = options.vocab, context](int64_t items) { return torch::randint(vocab, {items, context}); };
  model.loss = [gpt, context](const Tensor& tokens, const Layer& run) mutable {
    Tensor h = gpt->token_embedding->forward(tokens) +
               gpt->position_embedding->forward(torch::arange(context, tokens.device()));
    h = gpt->norm->forward(run(h));
    const Tensor logits = torch::matmul(h, gpt->head_weight().t());
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.flatten());
  };
  return model;
}

DeepModel deep_resnet(int64_t depth, int64_t batch) {
  torch::manual_seed(1);
  ResNet resnet(ResNetOptions{.depth = depth});
  DeepModel model{.name = "resnet",
                  .what = fmt::format("ResNet-{} on pictures of 32 x 32", depth),
                  .module = resnet.ptr(),
                  .layers = {},
                  .batch = batch};
  for (ResNetBlock block : resnet->blocks) {
    model.layers.push_back([block](const Tensor& x) mutable { return block->forward(x); });
  }
  model.reversible_part = "pairs of equal shape";
  model.reversible = reversible_resnet(resnet, resnet->blocks.size() / resnet->options.widths.size());
  model.input = [](int64_t items) { return torch::randn({items, 3, 32, 32}); };
  model.loss = [resnet](const Tensor& x, const Layer& run) mutable {
    const Tensor h = run(resnet->stem->forward(x));
    return torch::nn::functional::cross_entropy(resnet->head->forward(h.mean({2, 3})),
                                                torch::arange(x.size(0), x.device()) % 10);
  };
  return model;
}

DeepModel on_device(DeepModel model, c10::Device device) {
  move_to(*model.module, device);
  model.input = [make = std::move(model.input), device](int64_t items) { return make(items).to(device); };
  return model;
}

std::vector<Technique> techniques_for(const DeepModel& model) {
  const auto n = static_cast<int64_t>(model.layers.size());
  const int64_t root = std::lround(std::sqrt(static_cast<double>(n)));
  std::vector<Technique> all{
      {.name = "plain", .label = "", .run = [](const DeepModel& m, const Tensor& x) { return in_order(m.layers, x); }},
      in_segments(n, "every layer"),
      in_segments(2, "2 segments"),
      {.name = "nested",
       .label = "",
       .run = [](const DeepModel& m, const Tensor& x) { return nested(m.layers, 0, m.layers.size(), x); }},
      {.name = "selective",
       .label = "keeps matrix products",
       .run = [](const DeepModel& m,
                 const Tensor& x) { return each_checkpointed(m.layers, x, {.policy = save_matmuls}); }},
      {.name = "offload",
       .label = model.parameters().front().is_cpu() ? "to a file" : "to host memory",
       .run = [](const DeepModel& m, const Tensor& x) { return in_order(m.layers, x); },
       .offloads = true},
  };
  if (root > 2) {
    all.insert(all.begin() + 3, in_segments(root, fmt::format("sqrt(n) = {} segments", root)));
  }
  if (model.reversible) {
    all.push_back({.name = "reversible",
                   .label = model.reversible_part,
                   .run = [](const DeepModel& m, const Tensor& x) { return m.reversible(x); },
                   .is_same_network = false});
  }
  return all;
}

const Technique& every_layer(const std::vector<Technique>& techniques) { return techniques[1]; }

Tensor forward_under(const Technique& technique, const DeepModel& model, const Tensor& input) {
  std::optional<SaveOnHost> offload;
  if (technique.offloads) {
    offload.emplace(OffloadOptions{.min_bytes = Bytes(1 << 16)});
  }
  return model.loss(input, [&](Tensor x) { return technique.run(model, std::move(x)); });
}

}  // namespace snug::measure
