#include "snug/step_in_backward.h"

#include <optional>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/gradient_hooks.h"

namespace snug {

StepInBackward::StepInBackward(FusedOptimizer& optimizer) : hooks_(std::make_unique<detail::GradientHooks>()) {
  size_t number = 0;
  std::optional<c10::Device> device;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.device() != device.value_or(parameter.device())) {
        throw ConfigError(
            "StepInBackward: parameters are on several devices, whose backward runs in several threads; give one");
      }
      if (detail::has_gradient_hook(parameter)) {
        throw ConfigError(fmt::format(
            "StepInBackward: parameter {} has a hook after its gradient already; is another StepInBackward alive?",
            number));
      }
      hooks_->set(parameter, [&optimizer](const at::Tensor& complete) {
        optimizer.step_parameter(complete);
        complete.mutable_grad().reset();
      });
      device = parameter.device();
      ++number;
    }
  }
}

StepInBackward::~StepInBackward() = default;

}  // namespace snug
