#include "snug/optim/compact_adamw.h"

#include <utility>

#include <ATen/ATen.h>

#include "snug/core/detail/parallel.h"
#include "snug/core/error.h"
#include "snug/kernels/detail/compact_adamw.h"
#include "snug/optim/detail/adam_rules.h"
#include "snug/optim/detail/adamw_update.h"

namespace snug {
namespace {

using AdamWGroup = torch::optim::AdamWOptions;

struct CompactUpdate {
  kernels::AdamWStep step;
  int64_t count;
  kernels::CompactAdamWTensors tensors;
  std::vector<at::Tensor> alive;  // what `tensors` points to
};

kernels::BFloat16* bfloats(const at::Tensor& tensor) {
  return static_cast<kernels::BFloat16*>(tensor.mutable_data_ptr());
}

void make_updates(const std::vector<CompactUpdate>& updates) {
  std::vector<int64_t> counts;
  for (const CompactUpdate& update : updates) {
    counts.push_back(update.count);
  }
  constexpr int64_t kGrain = 256 * kernels::kCompandingBlock;
  detail::parallel_for(counts, kGrain, [&](size_t i, int64_t begin, int64_t end) {
    kernels::compact_adamw_update(updates[i].step, updates[i].tensors.from(begin), end - begin);
  });
}

}  // namespace

CompactAdamW::CompactAdamW(std::vector<at::Tensor> parameters, CompactAdamWOptions options)
    : CompactAdamW(std::vector{torch::optim::OptimizerParamGroup(without_repeats(std::move(parameters)))}, options) {}

CompactAdamW::CompactAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, CompactAdamWOptions options)
    : FusedOptimizer(groups, detail::to_adam_options<AdamWGroup>(options),
                     detail::adam_rules<AdamWGroup>("CompactAdamW")) {
  finish_construction(groups);
}

void CompactAdamW::make_state(ParameterState& state, const at::Tensor& parameter,
                              const torch::optim::OptimizerOptions&) const {
  if (!parameter.is_contiguous()) {  // blocks follow memory, and a state does not say how its model lay there
    throw ConfigError(fmt::format(
        "CompactAdamW: {} is not contiguous; make it contiguous() before its optimizer is made", describe(parameter)));
  }
  const auto zeros = [&](int64_t count, at::ScalarType dtype) {
    return at::zeros({count}, parameter.options().dtype(dtype));
  };
  const int64_t elements = parameter.numel();
  const int64_t blocks = kernels::companding_blocks(elements);
  state.tensors.emplace_back("step", detail::step_count_for(parameter));
  state.tensors.emplace_back("correction", zeros(elements, at::kChar));
  state.tensors.emplace_back("exp_avg", zeros(elements, at::kChar));
  state.tensors.emplace_back("exp_avg_scale", zeros(blocks, at::kFloat));
  state.tensors.emplace_back("exp_avg_sq", zeros(elements, at::kByte));
  state.tensors.emplace_back("exp_avg_sq_scale", zeros(blocks, at::kFloat));
}

int64_t CompactAdamW::state_multiple() const { return kernels::kCompandingBlock; }

std::function<void()> CompactAdamW::prepare(const Work& work) const {
  if (!work.parameters.front().is_cpu()) {
    throw ConfigError(
        fmt::format("CompactAdamW: {} is on {}; its kernel runs on the CPU only, use AdamW with "
                    "master_weights there",
                    describe(work.parameters.front()), work.parameters.front().device().str()));
  }
  if (work.found_inf.defined() && work.found_inf.item<float>() != 0) {
    return [] {};
  }
  const auto& o = static_cast<const AdamWGroup&>(*work.options);
  const detail::StepCounts counts(work.states_named("step"), {});
  std::vector<CompactUpdate> updates;
  for (size_t i = 0; i < work.parameters.size(); ++i) {
    const at::Tensor& parameter = work.parameters[i];
    const ParameterState& state = *work.states[i];
    CompactUpdate update{
        detail::kernel_step(o, counts.counted[i].item<double>(), work.grad_scale), parameter.numel(), {}, {}};
    update.tensors = {.parameter = bfloats(parameter),
                      .correction = state.at("correction").mutable_data_ptr<int8_t>(),
                      .gradient = bfloats(work.gradients[i]),
                      .exp_avg = state.at("exp_avg").mutable_data_ptr<int8_t>(),
                      .exp_avg_sq = state.at("exp_avg_sq").mutable_data_ptr<uint8_t>(),
                      .exp_avg_scale = state.at("exp_avg_scale").mutable_data_ptr<float>(),
                      .exp_avg_sq_scale = state.at("exp_avg_sq_scale").mutable_data_ptr<float>()};
    update.alive = {parameter, work.gradients[i]};
    for (const auto& [tensor_name, tensor] : state.tensors) {
      update.alive.push_back(tensor);
    }
    updates.push_back(std::move(update));
  }
  return detail::and_count([updates = std::move(updates)] { make_updates(updates); }, work, counts);
}

at::Tensor CompactAdamW::full_weight(const at::Tensor& parameter) const {
  if (is_state_in_file()) {
    throw ConfigError("CompactAdamW.full_weight: the state is in a file; call keep_state_in_memory() first");
  }
  bool holds_it = false;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& p : group.params()) {
      holds_it = holds_it || p.is_same(parameter);
    }
  }
  if (!holds_it) {
    throw ConfigError("CompactAdamW.full_weight: this optimizer does not hold the parameter");
  }
  const at::NoGradGuard no_grad;
  at::Tensor weight = parameter.to(at::kFloat);
  const auto known = state_.find(parameter.unsafeGetTensorImpl());
  if (known != state_.end()) {
    const auto& state = static_cast<const ParameterState&>(*known->second);
    kernels::join_weights(bfloats(parameter), state.at("correction").const_data_ptr<int8_t>(),
                          weight.mutable_data_ptr<float>(), parameter.numel());
  }
  return weight;
}

}  // namespace snug
