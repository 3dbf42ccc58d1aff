#include "program/measure/parallel_gpt.h"

#include <optional>
#include <utility>

#include <torch/torch.h>

#include "program/measure/measure.h"

namespace snug::measure {

ParallelGpt::ParallelGpt(std::shared_ptr<ProcessGroup> group, int64_t layers, int64_t width,
                         DataParallelOptions options)
    : group_(std::move(group)) {
  torch::manual_seed(1);
  model_ = Gpt(GptOptions{.context = 128, .layers = layers, .heads = width / 32, .width = width});
  tokens_ = torch::randint(256, {2, 128});
  data_parallel_ = std::make_unique<DataParallel>(model_, group_, std::move(options));
}

void ParallelGpt::step(int micro_batches, int loud) {
  model_->zero_grad();
  for (int i = 0; i < micro_batches; ++i) {
    std::optional<NoSync> quiet;
    if (i < micro_batches - loud) {
      quiet.emplace(*data_parallel_);
    }
    data_parallel_
        ->forward([&] {
          return torch::nn::functional::cross_entropy(model_->forward(tokens_).flatten(0, 1), tokens_.flatten());
        })
        .backward();
  }
}

double slowest_seconds(ProcessGroup& group, const std::function<void()>& work) {
  group.barrier();
  const at::Tensor seconds = torch::full({}, seconds_of(torch::kCPU, work), torch::kDouble);
  group.all_reduce(seconds, ReduceOp::Max);
  return seconds.item<double>();
}

}  // namespace snug::measure
