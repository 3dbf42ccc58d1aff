#include "snug/run/detail/run_optimizer.h"

#include <utility>
#include <vector>

#include "snug/distributed/sharded_optimizer.h"
#include "snug/optim/adamw.h"

namespace snug::detail {
namespace {

using torch::optim::OptimizerParamGroup;

// Biases and norms are not decayed: GPT recipes usually decay only matrices, embeddings among them.
std::vector<OptimizerParamGroup> parameter_groups(const torch::nn::Module& model, const TrainConfig& config) {
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const at::Tensor& parameter : model.parameters()) {
    (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  }
  const auto options = [&](double weight_decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(config.lr).betas({0.9, 0.99}).weight_decay(weight_decay));
  };
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), options(config.weight_decay));
  groups.emplace_back(std::move(others), options(0.0));
  return groups;
}

}  // namespace

RunOptimizer::RunOptimizer(const torch::nn::Module& model, const TrainConfig& config,
                           const std::shared_ptr<ProcessGroup>& group)
    : scratch_(config.out) {
  const auto make = [](const std::vector<OptimizerParamGroup>& groups) { return std::make_unique<AdamW>(groups); };
  const auto groups = parameter_groups(model, config);
  if (config.shard_optimizer && group != nullptr) {
    optimizer_ = std::make_unique<ShardedOptimizer>(groups, group, make);
  } else {
    optimizer_ = make(groups);
  }
}

void RunOptimizer::while_whole(const std::function<void()>& save) {
  auto* sharded = dynamic_cast<ShardedOptimizer*>(optimizer_.get());
  if (sharded != nullptr) {
    sharded->consolidate(0, scratch_);
  }
  save();
  if (sharded != nullptr) {
    sharded->release();
  }
}

}  // namespace snug::detail
