#include "src/step/check_options.h"

#include <algorithm>
#include <limits>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/version.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/limit_below_use.h"
#include "src/core/optimizer_capabilities.h"
#include "src/core/unnamed_file.h"

namespace snug::detail {

void check(const StepperOptions& options) {
  if (options.micro_batch < 0) {
    throw ConfigError(fmt::format("Stepper: micro_batch is {}; give a number of items, or 0 for the whole batch",
                                  options.micro_batch));
  }
  constexpr int64_t kMostAccumulated = std::numeric_limits<int32_t>::max();  // the items of so many can be counted
  if (options.accumulate.every < 1 || options.accumulate.every > kMostAccumulated) {
    throw ConfigError(
        fmt::format("Stepper: accumulate.every is {}; it must be 1 to {}", options.accumulate.every, kMostAccumulated));
  }
  if (options.sixteen_bit.guard.patience.value_or(0) > 0 && options.precision == Precision::Float32) {
    throw ConfigError(
        "Stepper: sixteen_bit.guard has nothing to guard in Float32; give another precision, or leave it out");
  }
  if (options.sixteen_bit.fp32_reductions && options.precision == Precision::Float32) {
    throw ConfigError(
        "Stepper: fp32_reductions changes nothing in Float32, where all is FP32; give another precision, or leave it "
        "out");
  }
  if (options.ranks.check_replicas_every < 0 ||
      (options.ranks.check_replicas_every > 0 && options.ranks.data_parallel == nullptr)) {
    throw ConfigError(
        fmt::format("Stepper: check_replicas_every is {}; give a number of steps, together with data_parallel",
                    options.ranks.check_replicas_every));
  }
  if (std::find(options.budget.carried.begin(), options.budget.carried.end(), nullptr) !=
      options.budget.carried.end()) {
    throw ConfigError("Stepper: carried has a null pointer; give the addresses of tensors");
  }
  if (options.before_update && options.gradient_noise) {
    throw ConfigError(
        "Stepper: gradient_noise compares norms of gradients that backward made, and before_update may change one of "
        "the two; leave one out");
  }
  if (!(options.clip_norm >= 0)) {
    throw ConfigError(
        fmt::format("Stepper: clip_norm is {}; it must be >= 0, and 0 turns clipping off", options.clip_norm));
  }
}

StepperOptions lasting(StepperOptions options) {
  options.budget.plan_folder = lasting(options.budget.plan_folder);
  if (options.budget.offload) {
    options.budget.offload = lasting(*options.budget.offload);
  }
  return options;
}

Precision check_state(const StateDict& state, const StepperOptions& options, Precision precision) {
  const Precision saved = precision_from_string(state.get<std::string>("precision"));
  if (options.precision != Precision::Auto && saved != precision) {
    throw ConfigError(
        fmt::format("Stepper.load_state_dict: the state is of a {} run, this one is {}; give the same precision",
                    to_string(saved), to_string(precision)));
  }
  if (const bool had_masters = state.contains("masters"); had_masters != (options.weights == Weights::Low)) {
    throw ConfigError(fmt::format(
        "Stepper.load_state_dict: the state is of a run with weights {}, this one has {}; give the same weights",
        had_masters ? "low" : "full", had_masters ? "full" : "low"));
  }
  return saved;
}

void check_planning(const torch::nn::Module& model, const StepperOptions& options, const StepRanks& ranks, bool plans) {
  if (options.gradient_noise && options.micro_batch == 0 && options.accumulate.every == 1 && !plans) {
    throw ConfigError(
        "Stepper: gradient_noise compares a micro-batch with the batch, and nothing splits this one; give micro_batch, "
        "accumulate.every, or a memory budget");
  }
  if (options.budget.offload && !plans) {
    throw ConfigError(
        "Stepper: offload is for plans to keep a memory budget, and there are none; give a memory budget, "
        "or a SaveOnHost around the steps instead");
  }
  model.apply([&](const torch::nn::Module& module) {
    const auto* sender = dynamic_cast<const SendsInForward*>(&module);
    if (plans && sender != nullptr && sender->sends_over() != nullptr && !ranks.are(sender->sends_over())) {
      throw ConfigError(
          "Stepper: a memory budget is planned for by passes of each rank alone, but a SyncBatchNorm speaks with others "
          "in forward; give data_parallel, made with the same group, or plan = false, which leaves the limit");
    }
  });
}

void check_budget(Bytes budget, c10::Device device) {
  if (const Bytes live = live_bytes(device); live > budget) {
    throw BudgetExceeded(fmt::format(
        "Stepper: {} of tensors are alive outside of the step, more than the memory budget {}; give a larger "
        "budget, or release some of them before the step",
        live.str(), budget.str()));
  }
  try {
    const MemoryLimit can_be_set(device, budget);
  } catch (const LimitBelowUse& error) {
    throw BudgetExceeded(fmt::format("Stepper: the memory budget {} is too small: {}", budget.str(), error.what()));
  }
}

std::string describe_stepper(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                             const StepperOptions& options, const StepRanks& ranks, Precision precision, Bytes budget) {
  nlohmann::json tensors = nlohmann::json::array();
  for (const auto& all : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& entry : all) {
      const at::Tensor& tensor = entry.value();
      tensors.push_back({entry.key(), c10::DeviceTypeName(tensor.device().type()), c10::toString(tensor.scalar_type()),
                         tensor.sizes().vec(), tensor.requires_grad()});
    }
  }
  return nlohmann::json{{"snug", SNUG_VERSION},
                        {"torch", TORCH_VERSION},
                        {"cpu", at::get_cpu_capability()},
                        {"threads", at::get_num_threads()},
                        {"rank", ranks.rank()},
                        {"ranks", ranks.size()},
                        {"weights_on_other_ranks", ranks.weights_of_others().outside},
                        {"budget", budget.count()},
                        {"offload", options.budget.offload ? options.budget.offload->string() : ""},
                        {"precision", to_string(precision)},
                        {"low_weights", options.weights == Weights::Low},
                        {"fp32_reductions", options.sixteen_bit.fp32_reductions},
                        {"micro_batch", options.micro_batch},
                        {"carried", !options.budget.carried.empty()},
                        {"split_batch_norm", options.budget.split_batch_norm},
                        {"optimizer", kind_of(optimizer)},
                        {"tensors", tensors}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // names need not be UTF-8
}
}  // namespace snug::detail
