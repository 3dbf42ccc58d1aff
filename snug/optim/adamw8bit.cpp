#include "snug/optim/adamw8bit.h"

#include <utility>

#include <ATen/ATen.h>

#include "snug/core/detail/parallel.h"
#include "snug/core/error.h"
#include "snug/kernels/detail/quantized_adamw.h"
#include "snug/optim/detail/adam_rules.h"

namespace snug {
namespace {

using TorchAdamW = torch::optim::AdamWOptions;

struct Element8bit {
  kernels::AdamWStep step;
  at::Tensor parameter, gradient, exp_avg, exp_avg_max, exp_avg_sq, exp_avg_sq_max;

  /// `begin` is where a block begins.
  void update(int64_t begin, int64_t end) const {
    const int64_t block = begin / kernels::kQuantizationBlock;
    kernels::adamw8bit_update(
        step, parameter.mutable_data_ptr<float>() + begin, gradient.const_data_ptr<float>() + begin,
        exp_avg.mutable_data_ptr<uint8_t>() + begin, exp_avg_sq.mutable_data_ptr<uint8_t>() + begin,
        exp_avg_max.mutable_data_ptr<float>() + block, exp_avg_sq_max.mutable_data_ptr<float>() + block, end - begin);
  }
};

void update_all(const std::vector<Element8bit>& elements) {
  std::vector<int64_t> counts;
  for (const Element8bit& element : elements) {
    counts.push_back(element.parameter.numel());
  }
  constexpr int64_t kGrain = 64 * kernels::kQuantizationBlock;
  detail::parallel_for(counts, kGrain, [&](size_t i, int64_t begin, int64_t end) { elements[i].update(begin, end); });
}

}  // namespace

AdamW8bit::AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions options)
    : AdamW8bit(std::vector{torch::optim::OptimizerParamGroup(without_repeats(std::move(parameters)))}, options) {}

AdamW8bit::AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamW8bitOptions options)
    : FusedOptimizer(groups, detail::to_adam_options<TorchAdamW>(options), detail::adam_rules<TorchAdamW>("AdamW8bit")),
      min_elements_(options.min_elements) {
  if (min_elements_ < 1) {
    throw ConfigError(fmt::format("AdamW8bit: min_elements is {}; it must be >= 1", min_elements_));
  }
  check_construction(groups);
}

void AdamW8bit::make_state(ParameterState& state, const at::Tensor& parameter,
                           const torch::optim::OptimizerOptions&) const {
  if (!parameter.is_contiguous()) {  // blocks follow memory, and a state does not say how its model lay there
    throw ConfigError(fmt::format("AdamW8bit: {} is not contiguous; make it contiguous() before its optimizer is made",
                                  describe(parameter)));
  }
  state.tensors.emplace_back("step", at::zeros({}, parameter.options()));
  for (const auto& [values, maxima] :
       {std::pair{"exp_avg", "exp_avg_max"}, std::pair{"exp_avg_sq", "exp_avg_sq_max"}}) {
    if (is_small(parameter)) {
      state.tensors.emplace_back(values, at::zeros_like(parameter, at::MemoryFormat::Preserve));
    } else {
      state.tensors.emplace_back(values, at::zeros({parameter.numel()}, parameter.options().dtype(at::kByte)));
      state.tensors.emplace_back(maxima,
                                 at::zeros({kernels::quantization_blocks(parameter.numel())}, parameter.options()));
    }
  }
}

int64_t AdamW8bit::state_multiple() const { return kernels::kQuantizationBlock; }

std::function<void()> AdamW8bit::prepare(const Work& work) const {
  if (!work.parameters.front().is_cpu()) {
    throw ConfigError(fmt::format("AdamW8bit: {} is on {}; its kernel runs on the CPU only, use AdamW there",
                                  describe(work.parameters.front()), work.parameters.front().device().str()));
  }
  if (work.found_inf.defined() && work.found_inf.item<float>() != 0) {
    return [] {};
  }
  const auto& o = static_cast<const TorchAdamW&>(*work.options);
  const auto steps = at::_foreach_add(work.states_named("step"), 1);
  std::vector<Element8bit> large;
  Work small = work;
  small.parameters.clear(), small.gradients.clear(), small.states.clear();
  std::vector<at::Tensor> small_steps;
  for (size_t i = 0; i < work.parameters.size(); ++i) {
    const at::Tensor& parameter = work.parameters[i];
    ParameterState& state = *work.states[i];
    if (!state.contains("exp_avg_max")) {
      small.parameters.push_back(parameter);
      small.gradients.push_back(work.gradients[i]);
      small.states.push_back(&state);
      small_steps.push_back(steps[i]);
      continue;
    }
    const auto step = detail::kernel_step(o, steps[i].item<double>(), work.grad_scale);
    large.push_back({step, parameter, work.gradients[i], state.at("exp_avg"), state.at("exp_avg_max"),
                     state.at("exp_avg_sq"), state.at("exp_avg_sq_max")});
  }
  return [large = std::move(large), small = std::move(small), small_steps = std::move(small_steps), steps,
          states = work.states, &o] {
    update_all(large);
    if (!small.parameters.empty()) {
      const auto [beta1, beta2] = o.betas();
      at::_fused_adamw_(small.parameters, small.gradients, small.states_named("exp_avg"),
                        small.states_named("exp_avg_sq"), /*max_exp_avg_sqs=*/{}, small_steps, o.lr(), beta1, beta2,
                        o.weight_decay(), o.eps(), /*amsgrad=*/false, /*maximize=*/false,
                        detail::if_defined(small.grad_scale));
    }
    for (size_t i = 0; i < states.size(); ++i) {
      states[i]->at("step") = steps[i];
    }
  };
}

}  // namespace snug
