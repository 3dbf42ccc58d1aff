#include "src/core/gradient_hooks.h"

#include <memory>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

// Uses the hook that LibTorch's autograd calls after the accumulation of a leaf's gradient. In Python,
// register_post_accumulate_grad_hook registers the hook. Tried on LibTorch 2.11.0 and 2.13.0.

namespace snug::detail {
namespace {

class Call final : public torch::autograd::PostAccumulateGradHook {
 public:
  Call(std::function<void(const at::Tensor&)> call, GradientHooks::Runs when) : runs(when), call_(std::move(call)) {}
  void operator()(const torch::autograd::Variable& leaf) override { call_(leaf); }

  const GradientHooks::Runs runs;

 private:
  std::function<void(const at::Tensor&)> call_;
};

}  // namespace

bool has_gradient_hook(const at::Tensor& leaf) {
  namespace impl = torch::autograd::impl;
  // A tensor that never required a gradient has no autograd metadata, and so no hooks.
  return impl::get_autograd_meta(leaf) != nullptr && impl::post_acc_grad_hooks(leaf) != nullptr;
}

bool has_lasting_gradient_hook(const at::Tensor& leaf) {
  if (!has_gradient_hook(leaf)) {
    return false;
  }
  const auto* call = dynamic_cast<const Call*>(torch::autograd::impl::post_acc_grad_hooks(leaf).get());
  return call == nullptr || call->runs == GradientHooks::Runs::InStepsOnly;
}

GradientHooks::~GradientHooks() {
  for (const auto& [leaf, hook] : hooks_) {
    if (has_gradient_hook(leaf) && torch::autograd::impl::post_acc_grad_hooks(leaf).get() == hook) {
      torch::autograd::impl::set_post_acc_grad_hooks(leaf, nullptr);
    }
  }
}

void GradientHooks::set(const at::Tensor& leaf, std::function<void(const at::Tensor&)> call, Runs runs) {
  hooks_.reserve(hooks_.size() + 1);
  auto hook = std::make_unique<Call>(std::move(call), runs);
  hooks_.emplace_back(leaf, hook.get());
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(hook));
}

}  // namespace snug::detail
