#include "bindings/c/step_settings.h"

#include <charconv>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/sgd.h"

namespace snug::c {
namespace {

using MakeOptimizer = decltype(StepSettings::make_optimizer);

class Texts {
 public:
  explicit Texts(const char* const* settings) {
    for (; settings != nullptr && *settings != nullptr; ++settings) {
      const std::string_view text = *settings;
      const size_t sign = text.find('=');
      if (sign == std::string_view::npos) {
        throw ConfigError(fmt::format("snug_stepper_new: the setting '{}' is not NAME=VALUE", text));
      }
      if (!values_.emplace(text.substr(0, sign), text.substr(sign + 1)).second) {
        throw ConfigError(fmt::format("snug_stepper_new: '{}' is set twice", text.substr(0, sign)));
      }
    }
  }

  std::optional<std::string> take(const std::string& name) {
    const auto node = values_.extract(name);
    return node.empty() ? std::nullopt : std::optional(node.mapped());
  }

  template <class T>
  T number(const std::string& name, T otherwise) {
    const std::optional<std::string> text = take(name);
    if (!text) {
      return otherwise;
    }
    T value{};
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    if (error != std::errc() || end != text->data() + text->size()) {
      throw ConfigError(fmt::format("snug_stepper_new: {} is '{}', which is no number that it takes", name, *text));
    }
    return value;
  }

  void check_all_taken() const {
    if (!values_.empty()) {
      throw ConfigError(fmt::format(
          "snug_stepper_new: there is no setting '{}' for this optimizer; snug/c.h has those that there are",
          values_.begin()->first));
    }
  }

 private:
  std::map<std::string, std::string> values_;
};

template <class Optimizer, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

template <class Optimizer, class Options>
MakeOptimizer adam_of(Texts& texts, Options options) {
  options.lr = texts.number("lr", options.lr);
  auto& [beta1, beta2] = options.betas;
  beta1 = texts.number("beta1", beta1);
  beta2 = texts.number("beta2", beta2);
  options.eps = texts.number("eps", options.eps);
  options.weight_decay = texts.number("weight_decay", options.weight_decay);
  return maker<Optimizer>(options);
}

MakeOptimizer optimizer_of(Texts& texts) {
  const std::string name = texts.take("optimizer").value_or("adamw");
  if (name == "adamw") {
    return adam_of<AdamW>(texts, AdamWOptions());
  }
  if (name == "adamw8bit") {
    return adam_of<AdamW8bit>(texts, AdamW8bitOptions());
  }
  if (name == "adam") {
    return adam_of<Adam>(texts, AdamOptions());
  }
  if (name == "sgd") {
    return maker<SGD>(SGDOptions{.lr = texts.number("lr", 1e-3),
                                 .momentum = texts.number("momentum", 0.0),
                                 .weight_decay = texts.number("weight_decay", 0.0)});
  }
  throw ConfigError(fmt::format("snug_stepper_new: optimizer is '{}'; give adamw, adam, sgd or adamw8bit", name));
}

}  // namespace

StepSettings parse_step_settings(const char* const* settings) {
  Texts texts(settings);
  StepSettings result{.make_optimizer = optimizer_of(texts), .options = {}};
  StepperOptions& options = result.options;
  if (const auto memory = texts.take("memory")) {
    options.budget.memory = Bytes::parse(*memory);
  }
  options.micro_batch = texts.number<int64_t>("micro_batch", 0);
  options.clip_norm = texts.number("clip_norm", 0.0);
  if (const auto precision = texts.take("precision")) {
    options.precision = precision_from_string(*precision);
  }
  if (const auto offload = texts.take("offload")) {
    options.budget.offload = *offload;
  }
  options.budget.plan_folder = texts.take("plan_folder").value_or("");
  texts.check_all_taken();
  return result;
}

}  // namespace snug::c
