#include "snug/sgd.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include <ATen/ATen.h>

#include "snug/core.h"
#include "src/core/in_parts.h"
#include "src/optim/adam_rules.h"

// Momentum begins with the gradient itself: buffer = momentum * buffer + (1 - dampening) * gradient holds from the
// second step on. Without dampening a first buffer of zeros gives the same result, so the kernel need not know the
// first step, even if a scaler skips the first step on the device. With dampening the kernel must know the first step,
// and under a scaler the host has to wait for the device.

namespace snug {
namespace {

using TorchSGD = torch::optim::SGDOptions;
using detail::check_option;
using detail::is_rate;

const TorchSGD& sgd_options(const torch::optim::OptimizerOptions& options) {
  return detail::options_as<TorchSGD>("SGD", options);
}

at::Tensor buffer_for(const at::Tensor& parameter) { return at::zeros_like(parameter, at::MemoryFormat::Preserve); }

TorchSGD to_torch(const SGDOptions& o) {
  return TorchSGD(o.lr).momentum(o.momentum).dampening(o.dampening).weight_decay(o.weight_decay).nesterov(o.nesterov);
}

void check_sgd(std::string_view name, const torch::optim::OptimizerOptions& options) {
  const auto& o = sgd_options(options);
  check_option(name, is_rate(o.lr()), "lr", o.lr(), "finite and >= 0");
  check_option(name, is_rate(o.momentum()), "momentum", o.momentum(), "finite and >= 0");
  check_option(name, std::isfinite(o.dampening()), "dampening", o.dampening(), "finite");
  check_option(name, is_rate(o.weight_decay()), "weight_decay", o.weight_decay(), "finite and >= 0");
  if (o.nesterov() && (o.momentum() == 0 || o.dampening() != 0)) {
    throw ConfigError("SGD: nesterov needs a momentum above 0 and a dampening of 0");
  }
}

StateDict sgd_to_state(const torch::optim::OptimizerOptions& options) {
  const auto& o = sgd_options(options);
  StateDict state;
  state.set("lr", o.lr());
  state.set("momentum", o.momentum());
  state.set("dampening", o.dampening());
  state.set("weight_decay", o.weight_decay());
  state.set("nesterov", o.nesterov());
  return state;
}

std::unique_ptr<torch::optim::OptimizerOptions> sgd_from_state(std::string_view name, const StateDict& state) {
  detail::check_flag(name, state, "maximize", false);
  return std::make_unique<TorchSGD>(TorchSGD(detail::number_in(state, "lr"))
                                        .momentum(detail::number_in(state, "momentum"))
                                        .dampening(detail::number_in(state, "dampening"))
                                        .weight_decay(detail::number_in(state, "weight_decay"))
                                        .nesterov(state.get<bool>("nesterov")));
}

constexpr detail::OptionRules kSgdRules{"SGD", check_sgd, sgd_to_state, sgd_from_state};

}  // namespace

SGD::SGD(std::vector<at::Tensor> parameters, SGDOptions options)
    : SGD(std::vector{torch::optim::OptimizerParamGroup(without_repeats(std::move(parameters)))}, options) {}

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions options)
    : FusedOptimizer(groups, std::make_unique<TorchSGD>(to_torch(options)), kSgdRules) {
  finish_construction(groups);
}

void SGD::make_state(ParameterState& state, const at::Tensor& parameter,
                     const torch::optim::OptimizerOptions& options) const {
  if (sgd_options(options).momentum() != 0) {
    state.tensors.emplace_back("momentum_buffer", buffer_for(parameter));
  }
}

struct SGD::Call {
  std::vector<at::Tensor> parameters, gradients, buffers;
  std::vector<ParameterState*> states;
};

void SGD::run(const torch::optim::SGDOptions& o, const Call& call, bool is_first_step, const at::Tensor& grad_scale,
              const at::Tensor& found_inf) {
  const auto fused = [&](at::TensorList parameters, at::TensorList gradients, at::TensorList buffers) {
    at::_fused_sgd_(parameters, gradients, buffers, o.weight_decay(), o.momentum(), o.lr(), o.dampening(), o.nesterov(),
                    /*maximize=*/false, is_first_step, detail::if_defined(grad_scale), detail::if_defined(found_inf));
  };
  detail::call_in_parts(fused, call.parameters, call.gradients, call.buffers);
}

std::function<void()> SGD::prepare(const Work& work) const {
  const auto& o = sgd_options(*work.options);
  if (o.momentum() == 0) {
    return [work, &o] { run(o, {work.parameters, work.gradients, {}, {}}, false, work.grad_scale, work.found_inf); };
  }
  const bool first_is_special = o.dampening() != 0;
  if (first_is_special && work.found_inf.defined() && work.found_inf.item<float>() != 0) {
    std::vector<ParameterState*> still_fresh;
    std::copy_if(work.states.begin(), work.states.end(), std::back_inserter(still_fresh),
                 [](const ParameterState* state) { return state->is_fresh; });
    return [still_fresh] {
      for (ParameterState* state : still_fresh) {
        state->is_fresh = true;
      }
    };
  }
  Call first, later;
  for (size_t i = 0; i < work.parameters.size(); ++i) {
    ParameterState* state = work.states[i];
    const bool has_buffer = state->contains("momentum_buffer");  // false if momentum was 0 until now
    Call& call = first_is_special && (state->is_fresh || !has_buffer) ? first : later;
    call.parameters.push_back(work.parameters[i]);
    call.gradients.push_back(work.gradients[i]);
    call.buffers.push_back(has_buffer ? state->at("momentum_buffer") : buffer_for(work.parameters[i]));
    call.states.push_back(state);
  }
  return [&o, first = std::move(first), later = std::move(later), scale = work.grad_scale, found = work.found_inf] {
    run(o, first, true, scale, found);
    run(o, later, false, scale, found);
    for (const Call& call : {first, later}) {
      for (size_t i = 0; i < call.states.size(); ++i) {
        if (!call.states[i]->contains("momentum_buffer")) {
          call.states[i]->tensors.emplace_back("momentum_buffer", call.buffers[i]);
        }
      }
    }
  };
}

}  // namespace snug
