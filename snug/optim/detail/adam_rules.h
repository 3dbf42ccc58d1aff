#pragma once
// What Adam, AdamW and AdamW8bit share: the ranges of their options, the names under which these are saved, and first states.
// `O` is torch::optim::AdamOptions or torch::optim::AdamWOptions, which have the same fields.

#include <cmath>
#include <functional>
#include <memory>
#include <string_view>

#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "snug/core/error.h"
#include "snug/core/state.h"

namespace snug::detail {

inline void check_option(std::string_view optimizer, bool good, std::string_view option, double value,
                         std::string_view range) {
  if (!good) {
    throw ConfigError(fmt::format("{}: {} is {}; it must be {}", optimizer, option, value, range));
  }
}

/// `options` as an O. Throws ConfigError if they are of another optimizer.
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
  const auto is_rate = [](double x) { return x >= 0 && std::isfinite(x); };
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
O to_adam_options(const Given& given) {
  return O(given.lr).betas({given.beta1, given.beta2}).eps(given.eps).weight_decay(given.weight_decay);
}

template <class O>
StateDict adam_options_to_state(const torch::optim::OptimizerOptions& options) {
  const O& o = static_cast<const O&>(options);
  StateDict state;
  state.set("lr", o.lr());
  state.set("beta1", std::get<0>(o.betas()));
  state.set("beta2", std::get<1>(o.betas()));
  state.set("eps", o.eps());
  state.set("weight_decay", o.weight_decay());
  return state;
}

template <class O>
std::unique_ptr<torch::optim::OptimizerOptions> adam_options_from_state(const StateDict& state) {
  return std::make_unique<O>(O(state.get<double>("lr"))
                                 .betas({state.get<double>("beta1"), state.get<double>("beta2")})
                                 .eps(state.get<double>("eps"))
                                 .weight_decay(state.get<double>("weight_decay")));
}

}  // namespace snug::detail
