#include "program/measure/gpt_training.h"

#include <algorithm>
#include <utility>

#include <torch/torch.h>

#include "program/measure/measure.h"
#include "program/run/device.h"
#include "snug/adamw.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/offload.h"

namespace snug::measure {
namespace {

using at::Tensor;

std::unique_ptr<FusedOptimizer> fused_optimizer(const GptWay& way, const GptSizes& sizes,
                                                const std::vector<Tensor>& parameters) {
  std::unique_ptr<FusedOptimizer> optimizer;
  if (way.eight_bits) {
    optimizer = std::make_unique<AdamW8bit>(parameters, AdamW8bitOptions{.split_weights = way.has_split_weights});
  } else {
    optimizer = std::make_unique<AdamW>(parameters);
  }
  if (way.state_in_file) {
    optimizer->keep_state_in(StateFile{.directory = sizes.directory});
  }
  return optimizer;
}

// Makes the optimizer's state: by a short step, or, because a plan is for one shape, by a step that is planned.
void first_step(GptTraining& training, const GptWay& way, const GptSizes& sizes, int64_t sequences) {
  training.step(way.plans ? gpt_tokens(sizes, sequences, sizes.context) : gpt_tokens(sizes, 1, 8));
}

}  // namespace

GptTraining::GptTraining(const GptWay& way, const GptSizes& sizes, int64_t width) {
  torch::manual_seed(1);
  {
    std::optional<TensorsInFile> in_files;
    if (way.all_in_files) {
      in_files.emplace(sizes.directory);
    }
    model_ = Gpt(GptOptions{.context = sizes.context, .layers = sizes.layers, .heads = width / 32, .width = width});
  }
  if (way.has_split_weights) {
    model_->to(torch::kBFloat16);
  }
  move_to(*model_, sizes.device);
  if (way.checkpoints) {
    model_->set_block_runner([](const auto& block, Tensor x) { return checkpoint(block, std::move(x)); });
  }
  if (!way.splits && !way.updates_in_backward) {
    optimizer_ = std::make_unique<torch::optim::AdamW>(model_->parameters());
    return;
  }
  auto fused = fused_optimizer(way, sizes, model_->parameters());
  if (way.updates_in_backward) {
    in_backward_.emplace(*fused);
  }
  optimizer_ = std::move(fused);
  if (way.splits) {
    StepperOptions options{.micro_batch = 1};
    if (way.plans) {
      options.budget.memory = Bytes(sizes.limit);
    }
    if (way.all_in_files) {
      options.budget.offload = sizes.directory;
    }
    stepper_ = std::make_unique<Stepper>(model_, *optimizer_, options);
  }
}

double GptTraining::step(const Tensor& tokens) {
  if (stepper_) {
    return stepper_->step({tokens}, [&](const Batch& micro) { return Loss::mean(loss_of(micro[0]), micro[0].numel()); })
        .loss();
  }
  optimizer_->zero_grad();
  const Tensor loss = loss_of(tokens);
  loss.backward();
  if (!in_backward_) {
    optimizer_->step();
  }
  return loss.item<double>();
}

Tensor GptTraining::loss_of(const Tensor& tokens) {
  const Tensor logits = model_->forward(tokens).to(torch::kFloat);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.flatten());
}

Tensor gpt_tokens(const GptSizes& sizes, int64_t sequences, int64_t time) {
  return torch::randint(256, {sequences, std::min(time, sizes.context)}).to(sizes.device);
}

bool gpt_trains(const GptWay& way, const GptSizes& sizes, int64_t width) {
  return fits(sizes.device, sizes.limit, [&] {
    GptTraining training(way, sizes, width);
    const int64_t sequences = way.splits ? 2 : sizes.batch;  // more than two micro-batches have the same peak as two
    first_step(training, way, sizes, sequences);
    training.step(gpt_tokens(sizes, sequences, sizes.context));
  });
}

int64_t widest_gpt(const GptWay& way, const GptSizes& sizes, int64_t from) {
  const int64_t start = from / sizes.width_unit;
  return sizes.width_unit * (start + largest(200, [&](int64_t more) {
                               return gpt_trains(way, sizes, sizes.width_unit * (start + more));
                             }));
}

GptMeasured measure_gpt(const GptWay& way, const GptSizes& sizes, int64_t width) {
  const MemoryLimit limit(sizes.device, Bytes(sizes.limit));
  GptTraining training(way, sizes, width);
  first_step(training, way, sizes, sizes.batch);
  const Tensor tokens = gpt_tokens(sizes, sizes.batch, sizes.context);
  const int64_t before = live_bytes(sizes.device).count();
  MemoryMeter meter(sizes.device);
  meter.attach(*training.model());
  meter.attach(training.optimizer());
  GptMeasured measured{.seconds = seconds_of(sizes.device, [&] { training.step(tokens); })};
  measured.memory = meter.report();
  measured.peak_bytes = before + measured.memory.peak_bytes;
  measured.tokens_per_second = static_cast<double>(tokens.numel()) / measured.seconds;
  for (const Tensor& parameter : training.model()->parameters()) {
    measured.parameters += parameter.numel();
  }
  return measured;
}

}  // namespace snug::measure
