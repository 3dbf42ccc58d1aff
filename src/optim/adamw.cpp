#include "snug/adamw.h"

#include <map>
#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "snug/core.h"
#include "src/optim/adam_rules.h"
#include "src/optim/adamw_update.h"
#include "src/optim/low_precision_adamw.h"
#include "src/precision/low_precision.h"

namespace snug {
namespace {

using TorchAdamW = torch::optim::AdamWOptions;
using TorchAdam = torch::optim::AdamOptions;

using detail::step_count_for;
using detail::UpdateCounts;

constexpr auto kAdamWRules = detail::adam_rules<TorchAdamW>("AdamW");
constexpr auto kAdamRules = detail::adam_rules<TorchAdam>("Adam");

}  // namespace

AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions options)
    : AdamW(std::vector{torch::optim::OptimizerParamGroup(without_repeats(std::move(parameters)))}, options) {}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options)
    : FusedOptimizer(groups, detail::to_adam_options<TorchAdamW>(options), kAdamWRules),
      master_weights_(options.master_weights),
      stochastic_rounding_(options.stochastic_rounding) {
  if (master_weights_ && stochastic_rounding_) {
    throw ConfigError("AdamW: master_weights and stochastic_rounding are two cures of one trouble; choose one");
  }
  finish_construction(groups);
}

bool AdamW::takes(at::ScalarType dtype) const {
  return FusedOptimizer::takes(dtype) || (dtype == at::kHalf && master_weights_) ||
         (dtype == at::kBFloat16 && (master_weights_ || stochastic_rounding_));
}

std::string_view AdamW::why_not() const {
  if (stochastic_rounding_) {
    return "stochastic_rounding is for BF16; for FP16 give {.master_weights = true}";
  }
  return "updates smaller than half its resolution (1 part in 256 for BF16, in 2048 for FP16) would be rounded away. "
         "Give {.master_weights = true}, or for BF16 {.stochastic_rounding = true}, or let a Stepper hold masters "
         "(Weights::Low), or keep the model in FP32 and compute in 16 bits under Autocast";
}

void AdamW::make_state(ParameterState& state, const at::Tensor& parameter,
                       const torch::optim::OptimizerOptions&) const {
  const bool is_low = !FusedOptimizer::takes(parameter.scalar_type());
  const auto dtype = is_low ? at::kFloat : parameter.scalar_type();
  const auto zeros = [&] { return at::zeros_like(parameter, dtype, {}, {}, {}, at::MemoryFormat::Preserve); };
  state.tensors.emplace_back("step", step_count_for(parameter));
  state.tensors.emplace_back("exp_avg", zeros());
  state.tensors.emplace_back("exp_avg_sq", zeros());
  if (is_low && master_weights_) {
    state.tensors.emplace_back("master", at::empty_like(state.at("exp_avg")).copy_(parameter));
  }
}

int64_t AdamW::workspace_bytes() const {
  struct Counts {
    int64_t elements = 0, parameters = 0;
  };
  int64_t bytes = 0;
  for (const auto& group : param_groups()) {
    std::map<std::pair<std::string, at::ScalarType>, Counts> by_kind;  // each kind has a workspace of its own
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad() && detail::is_low(parameter) && takes(parameter.scalar_type())) {
        Counts& counts = by_kind[{parameter.device().str(), parameter.scalar_type()}];
        counts.elements += parameter.numel();
        ++counts.parameters;
      }
    }
    for (const auto& [kind, counts] : by_kind) {
      bytes += detail::low_precision_workspace_bytes(counts.elements, counts.parameters, master_weights_,
                                                     c10::Device(kind.first));
    }
  }
  return bytes;
}

std::function<void()> AdamW::prepare(const Work& work) const {
  UpdateCounts steps(work.states_named("step"), work.found_inf);
  std::function<void()> update;
  if (FusedOptimizer::takes(work.parameters.front().scalar_type())) {
    update = detail::prepare_fused_adam<TorchAdamW>(work, steps.counted);
  } else {
    update = detail::prepare_low_precision_adamw(detail::adamw_update(
        work, steps.counted, master_weights_ ? work.states_named("master") : std::vector<at::Tensor>()));
  }
  return detail::and_count(std::move(update), work, steps);
}

Adam::Adam(std::vector<at::Tensor> parameters, AdamOptions options)
    : Adam(std::vector{torch::optim::OptimizerParamGroup(without_repeats(std::move(parameters)))}, options) {}

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions options)
    : FusedOptimizer(groups, detail::to_adam_options<TorchAdam>(options), kAdamRules) {
  finish_construction(groups);
}

void Adam::make_state(ParameterState& state, const at::Tensor& parameter, const torch::optim::OptimizerOptions&) const {
  detail::add_adam_state(state, parameter);
}

std::function<void()> Adam::prepare(const Work& work) const {
  const UpdateCounts steps(work.states_named("step"), work.found_inf);
  return detail::and_count(detail::prepare_fused_adam<TorchAdam>(work, steps.counted), work, steps);
}

}  // namespace snug
