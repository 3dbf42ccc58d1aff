// What a Python program says, in C++. docs/pytorch.md shows these functions beside their Python.

#include <cmath>
#include <filesystem>
#include <iostream>
#include <utility>
#include <vector>

#include <snug/distributed/data_parallel.h>
#include <snug/distributed/sharded_optimizer.h>
#include <snug/snug.h>

namespace {

using torch::mse_loss;
using torch::Tensor;
using Model = torch::nn::Sequential;

Model make_model() {
  return Model(torch::nn::Linear(8, 32), torch::nn::GELU(), torch::nn::Linear(32, 32), torch::nn::GELU(),
               torch::nn::Linear(32, 1));
}

void mixed_step(Model& model, torch::optim::Optimizer& optimizer, snug::GradScaler& scaler, Tensor x, Tensor y) {
  optimizer.zero_grad();
  Tensor loss;
  {
    snug::Autocast autocast(torch::kCPU, torch::kHalf);
    loss = mse_loss(model->forward(x), y);
  }
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer);
  snug::clip_grad_norm_(model->parameters(), 1.0);
  const bool stepped = scaler.step(optimizer);
  scaler.update();
  std::cout << (stepped ? "stepped" : "skipped") << ", scale " << scaler.get_scale() << "\n";
}

Tensor part_in_fp32(Model& model, Tensor x) {
  snug::Autocast autocast(torch::kCPU, torch::kBFloat16);
  Tensor h = model->forward(x);
  {
    snug::Autocast off(torch::kCPU, torch::kBFloat16, {.enabled = false});
    h = h.to(torch::kFloat).square();
  }
  return h;
}

Tensor checkpointed(Model& model, Tensor x) {
  return snug::checkpoint([&](Tensor h) { return model->forward(h); }, x);
}

Tensor in_segments(Model& model, Tensor x) { return snug::checkpoint_sequential(model, /*segments=*/2, x); }

Tensor products_kept(Model& model, Tensor x) { return snug::checkpoint({.policy = snug::save_matmuls}, model, x); }

Tensor saved_on_host(Model& model, Tensor x) {
  snug::SaveOnHost offload;
  return model->forward(x);
}

Tensor saved_in_bf16(Model& model, Tensor x) {
  snug::SavedTensorHooks hooks([](const Tensor& t) { return std::any(std::pair(t.to(torch::kBFloat16), t.dtype())); },
                               [](std::any& kept) {
                                 const auto& [t, dtype] = std::any_cast<std::pair<Tensor, caffe2::TypeMeta>&>(kept);
                                 return t.to(dtype);
                               });
  return model->forward(x);
}

void accumulated_step(Model& model, torch::optim::Optimizer& optimizer, Tensor x, Tensor y) {
  snug::Stepper stepper(model, optimizer, {.micro_batch = 16});
  const auto result = stepper.step({x, y}, [&](const snug::Batch& micro) {
    return snug::Loss::mean(mse_loss(model->forward(micro[0]), micro[1]), micro.size());
  });
  std::cout << "loss " << result.loss() << " of " << result.micro_batches << " micro-batches\n";
}

void on_all_ranks(Model& model, const std::vector<snug::Batch>& micro_batches, const std::filesystem::path& folder) {
  auto group = snug::init_process_group();
  snug::DataParallel ddp(model, group, {.hook = snug::bfloat16_hook()});
  snug::ShardedOptimizer optimizer(model->parameters(), group, [](const auto& groups) {
    return std::make_unique<snug::AdamW>(groups, snug::AdamWOptions{.lr = 1e-3});
  });
  const auto loss_of = [&](const snug::Batch& micro) { return mse_loss(model->forward(micro[0]), micro[1]); };
  for (size_t i = 0; i + 1 < micro_batches.size(); ++i) {
    snug::NoSync quiet(ddp);
    ddp.forward([&] { return loss_of(micro_batches[i]); }).backward();
  }
  ddp.forward([&] { return loss_of(micro_batches.back()); }).backward();
  optimizer.step();
  group->save_together([&] { snug::SnapshotStore(folder).save(1, {{"optimizer", snug::stateful(optimizer)}}); });
}

void scheduled(Model& model, torch::optim::Optimizer& optimizer, snug::GradScaler& scaler) {
  const snug::WarmupCosine schedule{.peak = 1e-3, .warmup_steps = 10, .total_steps = 100};
  snug::Ema ema(model->parameters(), {.decay = 0.999});
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(schedule.at(ema.updates()));
  }
  scaler.scale(model->forward(torch::randn({4, 8})).square().mean()).backward();
  if (scaler.step(optimizer)) {
    ema.update();
  }
  scaler.update();
}

void memory_summary(Model& model, torch::optim::Optimizer& optimizer, Tensor x) {
  snug::MemoryMeter meter;
  meter.attach(*model);
  meter.attach(optimizer);
  model->forward(x).sum().backward();
  const snug::MemoryMeter::Report report = meter.report();
  std::cout << "peak " << snug::Bytes(report.peak_bytes).str() << ", of which activations "
            << snug::Bytes(report.activations).str() << "\n";
}

void under_a_limit(Model& model, Tensor x) {
  const snug::Bytes bytes = snug::live_bytes(torch::kCPU) + snug::Bytes::parse("1MiB");
  snug::MemoryLimit limit(torch::kCPU, bytes);
  model->forward(x).sum().backward();  // c10::OutOfMemoryError if it takes more
}

int64_t save_and_resume(Model& model, torch::optim::Optimizer& optimizer, const std::filesystem::path& folder) {
  snug::SnapshotStore snapshots(folder, {.keep = 3});
  const std::map<std::string, snug::Stateful> parts{{"model", snug::stateful(model)},
                                                    {"optimizer", snug::stateful(optimizer)}};
  snapshots.save(/*step=*/7, parts);
  return snapshots.load_latest(parts).value_or(0);
}

}  // namespace

int main() {
  torch::manual_seed(1);
  Model model = make_model();
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  snug::GradScaler scaler({.init_scale = 1024});
  const Tensor x = torch::randn({64, 8}), y = x.sum(1, /*keepdim=*/true);

  mixed_step(model, optimizer, scaler, x, y);
  const Tensor plain = model->forward(x);
  bool all_well = torch::equal(checkpointed(model, x), plain) && torch::equal(in_segments(model, x), plain) &&
                  torch::equal(products_kept(model, x), plain) && torch::equal(saved_on_host(model, x), plain) &&
                  torch::equal(saved_in_bf16(model, x), plain) && part_in_fp32(model, x).dtype() == torch::kFloat;
  optimizer.zero_grad();
  accumulated_step(model, optimizer, x, y);
  const auto folder = std::filesystem::temp_directory_path() / "snug_from_python";
  on_all_ranks(model, snug::micro_batches({x, y}, 32), folder / "ranks");
  scheduled(model, optimizer, scaler);
  memory_summary(model, optimizer, x);
  under_a_limit(model, x);
  all_well = all_well && save_and_resume(model, optimizer, folder) == 7;
  std::filesystem::remove_all(folder);
  if (!all_well) {
    return 1;
  }
  std::cout << "from_python: done\n";
}
