#pragma once
// The common parts of Adam, AdamW and AdamW8bit: the ranges of the options, the names of saved options, and the
// arguments of kernels. `O` is torch::optim::AdamOptions or torch::optim::AdamWOptions. Both types have the same
// fields.

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/core/number_in.h"
#include "src/kernels/adamw_step.h"
#include "src/optim/fused_optimizer_parts.h"

namespace snug::detail {

inline bool is_rate(double x) { return x >= 0 && std::isfinite(x); }

inline void check_option(std::string_view optimizer, bool good, std::string_view option, double value,
                         std::string_view range) {
  if (!good) {
    throw ConfigError(fmt::format("{}: {} is {}; it must be {}", optimizer, option, value, range));
  }
}

/// `options` as an O. Throws ConfigError if the options belong to another optimizer.
template <class O>
const O& options_as(std::string_view optimizer, const torch::optim::OptimizerOptions& options) {
  const auto* own = dynamic_cast<const O*>(&options);
  if (own == nullptr) {
    throw ConfigError(fmt::format("{}: a parameter group has the options of another optimizer; give {}", optimizer,
                                  c10::demangle(typeid(O).name())));
  }
  return *own;
}

template <class O>
void check_adam_options(std::string_view optimizer, const torch::optim::OptimizerOptions& options) {
  const O& o = options_as<O>(optimizer, options);
  const auto [beta1, beta2] = o.betas();
  check_option(optimizer, is_rate(o.lr()), "lr", o.lr(), "finite and >= 0");
  check_option(optimizer, beta1 >= 0 && beta1 < 1, "beta1", beta1, "in [0, 1)");
  check_option(optimizer, beta2 >= 0 && beta2 < 1, "beta2", beta2, "in [0, 1)");
  check_option(optimizer, is_rate(o.eps()), "eps", o.eps(), "finite and >= 0");
  check_option(optimizer, is_rate(o.weight_decay()), "weight_decay", o.weight_decay(), "finite and >= 0");
  if (o.amsgrad()) {
    throw ConfigError(fmt::format("{}: amsgrad is not offered; use torch's own optimizer for it", optimizer));
  }
}

template <class O, class Given>
std::unique_ptr<O> to_adam_options(const Given& given) {
  return std::make_unique<O>(O(given.lr).betas(given.betas).eps(given.eps).weight_decay(given.weight_decay));
}

/// Checks an option that Python saves, that snug lacks, and that changes the computation of a step. Throws ConfigError
/// unless `name` is absent or `expected`.
inline void check_flag(std::string_view optimizer, const StateDict& state, const std::string& name, bool expected) {
  if (state.contains(name) && state.get<bool>(name) != expected) {
    throw ConfigError(fmt::format("{}.load_state_dict: {} is {} in the state, which this optimizer does not offer",
                                  optimizer, name, !expected));
  }
}

template <class O>
constexpr bool kDecouplesDecay = std::is_same_v<O, torch::optim::AdamWOptions>;

template <class O>
StateDict adam_options_to_state(const torch::optim::OptimizerOptions& options) {
  const O& o = static_cast<const O&>(options);
  StateDict betas, state;
  betas.set("0", std::get<0>(o.betas()));
  betas.set("1", std::get<1>(o.betas()));
  state.set("lr", o.lr());
  state.set("betas", std::move(betas));
  state.set("eps", o.eps());
  state.set("weight_decay", o.weight_decay());
  state.set("decoupled_weight_decay", kDecouplesDecay<O>);
  return state;
}

template <class O>
std::unique_ptr<torch::optim::OptimizerOptions> adam_options_from_state(std::string_view optimizer,
                                                                        const StateDict& state) {
  check_flag(optimizer, state, "decoupled_weight_decay", kDecouplesDecay<O>);
  check_flag(optimizer, state, "amsgrad", false);
  check_flag(optimizer, state, "maximize", false);
  const auto& betas = state.get<StateDict>("betas");
  return std::make_unique<O>(O(number_in(state, "lr"))
                                 .betas({number_in(betas, "0"), number_in(betas, "1")})
                                 .eps(number_in(state, "eps"))
                                 .weight_decay(number_in(state, "weight_decay")));
}

template <class O>
constexpr OptionRules adam_rules(std::string_view optimizer) {
  return {optimizer, check_adam_options<O>, adam_options_to_state<O>, adam_options_from_state<O>};
}

/// An optional tensor, as an argument for torch's fused operators.
inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// One step for snug's own kernels, on the host. `t` is the number of the step; `grad_scale` is an FP32 scalar or
/// undefined.
inline kernels::AdamWStep kernel_step(const torch::optim::AdamWOptions& o, double t, const at::Tensor& grad_scale) {
  const auto [beta1, beta2] = o.betas();
  return {.lr = o.lr(),
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = o.eps(),
          .weight_decay = o.weight_decay(),
          .bias_correction1 = 1 - std::pow(beta1, t),
          .bias_correction2 = 1 - std::pow(beta2, t),
          .inverse_scale = grad_scale.defined() ? 1.0f / grad_scale.item<float>() : 1.0f};
}

}  // namespace snug::detail
