#include "program/run/run_optimizer.h"

#include <utility>
#include <vector>

#include <fmt/format.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/muon.h"
#include "snug/sgd.h"
#include "src/core/optimizer_capabilities.h"

namespace snug::detail {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

constexpr double kBeta1 = 0.9, kBeta2 = 0.99, kMomentum = 0.9;

std::unique_ptr<torch::optim::OptimizerOptions> options_of(const TrainConfig& config, double weight_decay) {
  if (config.optimizer == OptimizerChoice::Sgd) {
    return std::make_unique<torch::optim::SGDOptions>(
        torch::optim::SGDOptions(config.lr).momentum(kMomentum).weight_decay(weight_decay));
  }
  if (config.optimizer == OptimizerChoice::Adam) {
    return std::make_unique<torch::optim::AdamOptions>(
        torch::optim::AdamOptions(config.lr).betas({kBeta1, kBeta2}).weight_decay(weight_decay));
  }
  return std::make_unique<torch::optim::AdamWOptions>(
      torch::optim::AdamWOptions(config.lr).betas({kBeta1, kBeta2}).weight_decay(weight_decay));
}

// Biases and norms get no weight decay: GPT recipes usually decay only matrices, embeddings among them.
Groups parameter_groups(const torch::nn::Module& model, const TrainConfig& config) {
  // With steps of AdamW's size, so that both optimizers have one learning rate.
  if (config.optimizer == OptimizerChoice::Muon) {
    return Muon::groups(model, {.lr = config.lr, .weight_decay = config.weight_decay, .match_rms_adamw = true},
                        {.lr = config.lr, .betas = {kBeta1, kBeta2}, .weight_decay = 0});
  }
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const at::Tensor& parameter : model.parameters()) {
    (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  }
  Groups groups;
  groups.emplace_back(std::move(matrices), options_of(config, config.weight_decay));
  groups.emplace_back(std::move(others), options_of(config, 0.0));
  return groups;
}

std::unique_ptr<FusedOptimizer> optimizer_of(const TrainConfig& config, const Groups& groups) {
  switch (config.optimizer) {
    case OptimizerChoice::AdamW:
      break;
    case OptimizerChoice::AdamW8bit:
      return std::make_unique<AdamW8bit>(groups, AdamW8bitOptions{.split_weights = config.splits_weights()});
    case OptimizerChoice::Adam:
      return std::make_unique<Adam>(groups);
    case OptimizerChoice::Sgd:
      return std::make_unique<SGD>(groups);
    case OptimizerChoice::Muon:
      return std::make_unique<Muon>(groups);
  }
  return std::make_unique<AdamW>(groups);
}

}  // namespace

RunOptimizer::RunOptimizer(const torch::nn::Module& model, const TrainConfig& config,
                           const std::shared_ptr<ProcessGroup>& group, bool is_sharded) {
  const auto make = [&config](const Groups& groups) { return optimizer_of(config, groups); };
  const auto groups = parameter_groups(model, config);
  if (is_sharded && group != nullptr) {
    auto sharded = std::make_unique<ShardedOptimizer>(groups, group, make);
    sharded_ = sharded.get();
    optimizer_ = std::move(sharded);
  } else {
    optimizer_ = make(groups);
  }
  if (MovableState* const state = capabilities_of(*optimizer_).movable_state; !state->may_stay_on_device()) {
    state->keep_state_in(StateOnHost());  // whose updates the CPU makes
  }
}

int64_t RunOptimizer::state_bytes_to_come() const { return detail::state_bytes_to_come(*optimizer_); }

}  // namespace snug::detail
