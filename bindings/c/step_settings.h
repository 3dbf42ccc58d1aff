#pragma once
// The settings of a snug_stepper, from texts NAME=VALUE.

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "snug/stepper.h"

namespace snug::c {

struct StepSettings {
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> make_optimizer;
  StepperOptions options;
};

/// `settings` end with null; null: none. Throws ConfigError, which names the setting, for unknown names and values.
StepSettings parse_step_settings(const char* const* settings);

}  // namespace snug::c
