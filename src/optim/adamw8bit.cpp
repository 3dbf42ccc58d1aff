#include <utility>

#include <ATen/ATen.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "src/core/parallel.h"
#include "src/kernels/quantized_adamw.h"
#include "src/optim/adam_rules.h"
#include "src/optim/adamw_update.h"
#include "src/optim/low_precision_adamw.h"

namespace snug {
namespace {

using TorchAdamW = torch::optim::AdamWOptions;

// `correction` is undefined for FP32 parameters.
struct Element8bit {
  kernels::AdamWStep step;
  at::Tensor parameter, gradient, correction, exp_avg, exp_avg_max, exp_avg_sq, exp_avg_sq_max;

  /// `begin` is the begin of a block.
  void update(int64_t begin, int64_t end) const {
    const auto moments =
        kernels::EightBitMoments{exp_avg.mutable_data_ptr<uint8_t>(), exp_avg_sq.mutable_data_ptr<uint8_t>(),
                                 exp_avg_max.mutable_data_ptr<float>(), exp_avg_sq_max.mutable_data_ptr<float>()}
            .from(begin);
    if (correction.defined()) {
      kernels::adamw8bit_update(step, static_cast<kernels::BFloat16*>(parameter.mutable_data_ptr()) + begin,
                                correction.mutable_data_ptr<int8_t>() + begin,
                                static_cast<const kernels::BFloat16*>(gradient.const_data_ptr()) + begin, moments,
                                end - begin);
    } else {
      kernels::adamw8bit_update(step, parameter.mutable_data_ptr<float>() + begin,
                                gradient.const_data_ptr<float>() + begin, moments, end - begin);
    }
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

constexpr auto kAdamW8bitRules = detail::adam_rules<TorchAdamW>("AdamW8bit");

}  // namespace

AdamW8bit::AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions options)
    : AdamW8bit(std::vector{torch::optim::OptimizerParamGroup(without_repeats(std::move(parameters)))}, options) {}

AdamW8bit::AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamW8bitOptions options)
    : FusedOptimizer(groups, detail::to_adam_options<TorchAdamW>(options), kAdamW8bitRules),
      min_elements_(options.min_elements),
      split_weights_(options.split_weights) {
  if (min_elements_ < 1) {
    throw ConfigError(fmt::format("AdamW8bit: min_elements is {}; it must be >= 1", min_elements_));
  }
  finish_construction(groups);
}

void AdamW8bit::make_state(ParameterState& state, const at::Tensor& parameter,
                           const torch::optim::OptimizerOptions&) const {
  // Blocks follow memory, and a state does not store the memory layout of the parameter.
  if (!parameter.is_contiguous()) {
    throw ConfigError(fmt::format("AdamW8bit: {} is not contiguous; make it contiguous() before its optimizer is made",
                                  describe(parameter)));
  }
  const bool is_split = parameter.scalar_type() == at::kBFloat16;
  const auto zeros = [&](int64_t count, at::ScalarType dtype) {
    return at::zeros({count}, parameter.options().dtype(dtype));
  };
  state.tensors.emplace_back("step", detail::step_count_for(parameter));
  for (const auto& [values, maxima] :
       {std::pair{"exp_avg", "exp_avg_max"}, std::pair{"exp_avg_sq", "exp_avg_sq_max"}}) {
    if (is_small(parameter)) {
      state.tensors.emplace_back(values, at::zeros_like(parameter, parameter.options().dtype(at::kFloat)));
    } else {
      state.tensors.emplace_back(values, zeros(parameter.numel(), at::kByte));
      state.tensors.emplace_back(maxima, zeros(kernels::quantization_blocks(parameter.numel()), at::kFloat));
    }
  }
  if (is_split && is_small(parameter)) {
    state.tensors.emplace_back("master", at::empty_like(state.at("exp_avg")).copy_(parameter));
  } else if (is_split) {
    state.tensors.emplace_back("correction", zeros(parameter.numel(), at::kChar));
  }
}

bool AdamW8bit::may_stay_on_device() const { return is_on_cpu(); }

int64_t AdamW8bit::state_multiple() const { return kernels::kQuantizationBlock; }

std::function<void()> AdamW8bit::prepare(const Work& work) const {
  if (!work.parameters.front().is_cpu()) {
    throw ConfigError(
        fmt::format("AdamW8bit: {} is on {}; its kernel runs on the CPU only: let the CPU make the "
                    "updates, by keep_state_in(StateOnHost{{}}) or `offload` in a Stepper's budget",
                    describe(work.parameters.front()), work.parameters.front().device().str()));
  }
  if (work.found_inf.defined() && work.found_inf.item<float>() != 0) {
    return [] {};
  }
  const auto& o = static_cast<const TorchAdamW&>(*work.options);
  const detail::UpdateCounts counts(work.states_named("step"), {});
  const std::vector<at::Tensor>& steps = counts.counted;
  std::vector<Element8bit> large;
  Work small = work;  // the parameters with FP32 moments
  small.parameters.clear(), small.gradients.clear(), small.states.clear(), small.first_elements.clear();
  std::vector<at::Tensor> small_steps;
  for (size_t i = 0; i < work.parameters.size(); ++i) {
    const at::Tensor& parameter = work.parameters[i];
    ParameterState& state = *work.states[i];
    if (!state.contains("exp_avg_max")) {
      small.parameters.push_back(parameter);
      small.gradients.push_back(work.gradients[i]);
      small.states.push_back(&state);
      small.first_elements.push_back(work.first_elements[i]);
      small_steps.push_back(steps[i]);
      continue;
    }
    const auto step = detail::kernel_step(o, steps[i].item<double>(), work.grad_scale);
    large.push_back({step, parameter, work.gradients[i],
                     state.contains("correction") ? state.at("correction") : at::Tensor(), state.at("exp_avg"),
                     state.at("exp_avg_max"), state.at("exp_avg_sq"), state.at("exp_avg_sq_max")});
  }
  std::function<void()> update_small = [] {};
  if (!small.parameters.empty()) {
    update_small = small.parameters.front().scalar_type() == at::kBFloat16
                       ? detail::prepare_low_precision_adamw(
                             detail::adamw_update(small, small_steps, small.states_named("master")))
                       : detail::prepare_fused_adam<TorchAdamW>(small, small_steps);
  }
  const auto update = [large = std::move(large), update_small = std::move(update_small)] {
    update_all(large);
    update_small();
  };
  return detail::and_count(update, work, counts);
}

}  // namespace snug
