// Training on several ranks: by a loop of one's own, and by a Stepper. Started alone it is a group of one; on two
// ranks by `snug launch -n 2 -- data_parallel`. docs/ranks.md shows these functions.

#include <iostream>
#include <memory>
#include <optional>
#include <vector>

#include <snug/distributed/data_parallel.h>
#include <snug/distributed/sharded_optimizer.h>
#include <snug/distributed/sync_batch_norm.h>
#include <snug/snug.h>

namespace {

using torch::Tensor;
using Group = std::shared_ptr<snug::ProcessGroup>;

Tensor sum_loss(torch::nn::Sequential& model, const snug::Batch& batch) {
  return (model->forward(batch[0]) - batch[1]).square().sum();
}

std::unique_ptr<snug::FusedOptimizer> adamw(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  return std::make_unique<snug::AdamW>(groups, snug::AdamWOptions{.lr = 3e-3});
}

void by_hand(const Group& group, torch::nn::Sequential& model, const std::vector<snug::Batch>& batches) {
  snug::convert_sync_batch_norm(*model, group);  // if the model has BatchNorm
  snug::DataParallel ddp(model, group, {.hook = snug::bfloat16_hook()});
  snug::ShardedOptimizer optimizer(model->parameters(), group, adamw);
  for (const snug::Batch& batch : batches) {  // of this rank
    optimizer.zero_grad();
    const auto micro = snug::micro_batches(batch, 4);
    for (size_t i = 0; i < micro.size(); ++i) {
      std::optional<snug::NoSync> quiet;
      if (i + 1 < micro.size()) {
        quiet.emplace(ddp);  // the last one sends for all
      }
      ddp.forward([&] { return sum_loss(model, micro[i]) / batch[1].numel(); }).backward();
    }
    optimizer.step();
  }
  ddp.check_replicas();  // the parameters have the same bits on all ranks
}

void by_stepper(const Group& group, torch::nn::Sequential& model, const std::vector<snug::Batch>& batches) {
  snug::DataParallel ddp(model, group);
  snug::ShardedOptimizer optimizer(model->parameters(), group, adamw);
  snug::Stepper stepper(model, optimizer, {.micro_batch = 4, .clip_norm = 1.0, .ranks = {.data_parallel = &ddp}});
  for (const snug::Batch& batch : batches) {  // of this rank: any number of items, or none
    stepper.step(batch,
                 [&](const snug::Batch& micro) { return snug::Loss::sum(sum_loss(model, micro), micro[1].numel()); });
  }
}

torch::nn::Sequential make_model(bool has_batch_norm) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(6, 64));
  if (has_batch_norm) {
    model->push_back(torch::nn::BatchNorm1d(64));
  }
  model->push_back(torch::nn::Tanh());
  model->push_back(torch::nn::Linear(64, 2));
  return model;
}

// How far apart the parameters are, of their norm.
double difference(const torch::nn::Sequential& a, const torch::nn::Sequential& b) {
  const Tensor x = torch::nn::utils::parameters_to_vector(a->parameters());
  const Tensor y = torch::nn::utils::parameters_to_vector(b->parameters());
  return ((x - y).norm() / y.norm()).item<double>();
}

}  // namespace

int main() {
  const Group group = snug::init_process_group();
  const Group alone = snug::init_process_group({.rank = 0, .size = 1});
  std::vector<snug::Batch> whole, own;
  for (uint64_t step = 0; step < 5; ++step) {
    torch::manual_seed(2 + step);
    const Tensor x = torch::randn({32, 6});
    whole.push_back({x, x.slice(1, 0, 2).sin()});
    const int64_t share = 32 / group->size();
    own.push_back(whole.back().slice(group->rank() * share, (group->rank() + 1) * share));
  }

  torch::nn::Sequential one = make_model(false), many = make_model(false);
  by_stepper(alone, one, whole);
  by_stepper(group, many, own);
  torch::nn::Sequential normalised = make_model(true);
  by_hand(group, normalised, own);

  const double apart = difference(many, one);
  if (group->rank() == 0) {
    std::cout << group->size() << " ranks: parameters differ from one process's by " << apart << "\n";
  }
  if (!(apart < 1e-5)) {
    return 1;
  }
  std::cout << "data_parallel: done\n";
}
