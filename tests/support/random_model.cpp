#include "tests/support/random_model.h"

#include <iterator>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/support/random_blocks.h"
#include "tests/support/random_derivative_blocks.h"
#include "tests/support/random_unseen_blocks.h"

namespace snug::testing {
namespace {

using namespace blocks;

struct Kind {
  const char* name;
  bool picture;
  Layer (*make)(Build&);
};

constexpr Kind kKinds[] = {
    {"chain", false, chain},
    {"residual", false, residual},
    {"in_place", false, in_place},
    {"view_writes", false, view_writes},
    {"dropout", false, dropout},
    {"attention_by_hand", false, attention_by_hand},
    {"fused_attention", false, fused_attention},
    {"lstm", false, lstm},
    {"gru", false, gru},
    {"recurrent_cells", false, recurrent_cells},
    {"random_leak", false, random_leak},
    {"reads_buffers", false, reads_buffers},
    {"dense_concatenation", false, dense_concatenation},
    {"skips", false, skips},
    {"shared_weights", false, shared_weights},
    {"chunks", false, chunks},
    {"views", false, views},
    {"autocast", false, autocast},
    {"batch_norm", false, batch_norm},
    {"convolution_1d", false, convolution_1d},
    {"running_buffer", false, running_buffer},
    {"custom_function", false, custom_function},
    {"many_operators", false, many_operators},
    {"slope", false, slope},
    {"convolution", true, convolution},
    {"residual_batch_norm", true, residual_batch_norm},
    {"u_net", true, u_net},
    {"dense_net", true, dense_net},
    {"pooling", true, pooling},
    {"group_norm", true, group_norm},
    {"convolution_autocast", true, convolution_autocast},
    {"channel_dropout", true, channel_dropout},
    {"picture_attention", true, picture_attention},
    {"pointer_writes", false, pointer_writes},
    {"lent_tables", false, lent_tables},
    {"conjugates", false, conjugates},
    {"exchanged_storage", false, exchanged_storage},
    {"unrolled_loop", false, unrolled_loop},
    {"instance_norm", true, instance_norm},
    {"tangents", false, tangents},
    {"vmapped", false, vmapped},
    {"equilibrium", false, equilibrium},
    {"gradient_hook", false, gradient_hook},
    {"kept_results", false, kept_results},
};

// Token numbers in, and out over the same embedding.
void add_tied_embedding(RandomModel& model, Build& build, Layer body) {
  constexpr int64_t kVocabulary = 40;
  const auto embedding = build.add(nn::Embedding(kVocabulary, build.width));
  model.input = torch::randint(kVocabulary, {model.input.size(0), model.input.size(1)});
  model.loss = [=](const Tensor& tokens) {
    const Tensor logits = F::linear(body(embedding->forward(tokens)), embedding->weight);
    return F::cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten());
  };
}

}  // namespace

std::vector<Tensor> RandomModel::leaves() const {
  std::vector<Tensor> all = module->parameters();
  all.push_back(input);
  std::erase_if(all, [](const Tensor& leaf) { return !leaf.requires_grad(); });
  return all;
}

RandomModel random_model(uint64_t seed) {
  torch::manual_seed(seed);
  RandomModel model;
  model.module = std::make_shared<nn::Module>("RandomModel");
  Build build(*model.module, seed);
  model.kept = build.kept;
  const Kind& certain = kKinds[seed % std::size(kKinds)];
  if (certain.picture) {
    build.width = build.even(4, 10);
    const int64_t side = build.even(12, 24);
    model.input = torch::randn({2 + build.below(3), build.width, side, side});
  } else {
    build.width = build.even(24, 48);
    model.input = torch::randn({4 + build.below(4), 16 + build.below(25), build.width});
  }
  std::vector<Kind> kinds{certain};
  for (int64_t more = 1 + build.below(4); more > 0;) {
    const Kind& kind = kKinds[build.below(std::ssize(kKinds))];
    if (kind.picture == certain.picture) {
      kinds.insert(kinds.begin() + build.below(std::ssize(kinds) + 1), kind);
      --more;
    }
  }
  std::vector<Layer> layers;
  for (const Kind& kind : kinds) {
    layers.push_back(kind.make(build));
    model.kinds.emplace_back(kind.name);
  }
  const Layer body = [layers](Tensor x) {
    for (const Layer& layer : layers) {
      x = layer(x);
    }
    return x;
  };
  model.loss = [body](const Tensor& x) { return body(x).square().mean(); };
  if (!certain.picture && build.below(3) == 0) {
    add_tied_embedding(model, build, body);
  } else {
    model.input.set_requires_grad(build.below(3) == 0);
  }
  if (build.below(5) == 0) {
    model.module->parameters()[0].set_requires_grad(false);
  }
  model.description =
      fmt::format("seed {}, input [{}]: {}", seed, fmt::join(model.input.sizes(), ", "), fmt::join(model.kinds, ", "));
  return model;
}

std::vector<std::string> random_model_kinds() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) {
    names.emplace_back(kind.name);
  }
  return names;
}

}  // namespace snug::testing
