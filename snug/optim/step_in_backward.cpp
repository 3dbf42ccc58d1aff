#include "snug/optim/step_in_backward.h"

#include <memory>

#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "snug/core/error.h"

// Rests on the hook that LibTorch's autograd calls after it has accumulated a leaf's gradient, and which Python registers by
// register_post_accumulate_grad_hook. There is one place for it per tensor. Tried on LibTorch 2.11.0 and 2.13.0.

namespace snug {
namespace {

class UpdateAndFree final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit UpdateAndFree(FusedOptimizer& optimizer) : optimizer_(optimizer) {}

  void operator()(const torch::autograd::Variable& parameter) override {
    optimizer_.step_parameter(parameter);
    parameter.mutable_grad().reset();
  }

 private:
  FusedOptimizer& optimizer_;
};

}  // namespace

StepInBackward::StepInBackward(FusedOptimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameters_.empty() && parameter.device() != parameters_.front().device()) {
        remove_hooks();
        throw ConfigError(
            "StepInBackward: parameters are on several devices, whose backward runs in several threads; give one");
      }
      if (torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr) {
        remove_hooks();
        throw ConfigError(fmt::format(
            "StepInBackward: parameter {} has a hook after its gradient already; is another StepInBackward alive?",
            parameters_.size()));
      }
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<UpdateAndFree>(optimizer));
      parameters_.push_back(parameter);
    }
  }
}

StepInBackward::~StepInBackward() { remove_hooks(); }

void StepInBackward::remove_hooks() {
  for (const at::Tensor& parameter : parameters_) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  }
}

}  // namespace snug
