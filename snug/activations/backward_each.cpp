#include "snug/activations/backward_each.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "snug/core/error.h"
#include "snug/precision/detail/autocast_state.h"
#include "snug/precision/grad_scaler.h"

namespace snug {
namespace {

using Function = std::function<at::Tensor(at::Tensor)>;

void check(const at::Tensor& loss, size_t head) {
  if (!loss.defined() || loss.numel() != 1) {
    throw ConfigError(fmt::format("backward_each: head {} returned {}; a loss is one number", head,
                                  loss.defined() ? fmt::format("[{}]", fmt::join(loss.sizes(), ", ")) : "no tensor"));
  }
  if (!loss.requires_grad()) {
    throw ConfigError(fmt::format(
        "backward_each: the loss of head {} depends on nothing that needs a gradient; was it detached?", head));
  }
}

// The end of a head's graph: takes the gradient as it is, where a leaf would copy it into a layout of its own.
struct Caught final : torch::CustomClassHolder {
  at::Tensor gradient;
};

struct Catch final : torch::autograd::Function<Catch> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<Caught>& caught) {
    context->saved_data["caught"] = c10::IValue::make_capsule(caught);
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto capsule = context->saved_data.at("caught").toCapsule();
    static_cast<Caught&>(*capsule).gradient = gradients.at(0);
    return {{}, {}};
  }
};

// Backward from all of `outputs` at once, outside of autocast. Undefined gradients stand for ones.
void backward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients) {
  auto without = detail::AutocastState::capture();
  for (auto& each : without.devices) {
    each.enabled = false;
  }
  const detail::AutocastStateScope scope(without);
  torch::autograd::backward(outputs, gradients);
}

}  // namespace

std::vector<at::Tensor> backward_each(const at::Tensor& trunk_output, const std::vector<Function>& heads,
                                      GradScaler* scaler) {
  if (heads.empty()) {
    throw ConfigError("backward_each: there are no heads; give at least one");
  }
  const at::AutoGradMode enable_grad(true);
  const bool trains_trunk = trunk_output.requires_grad();
  std::vector<at::Tensor> losses(heads.size());
  at::Tensor gradient;  // of the trunk's output, from the heads that have run
  for (size_t i = heads.size(); i-- > 0;) {
    const auto end = c10::make_intrusive<Caught>();
    const at::Tensor detached = trunk_output.detach().set_requires_grad(trains_trunk);
    // No leaf, as the trunk's output is none: autocast would keep the cast of a leaf.
    const at::Tensor h = trains_trunk ? Catch::apply(detached, end) : detached;
    const at::Tensor loss = heads[i](h);
    check(loss, i);
    losses[i] = loss.detach();
    // As a root the gradient so far reaches `end` before those of this head are added, one after the other: the order
    // of the sum's backward.
    std::vector<at::Tensor> roots{scaler == nullptr ? loss : scaler->scale(loss)}, seeds(1);
    if (gradient.defined()) {
      roots.push_back(h);
      seeds.push_back(std::exchange(gradient, {}));
    }
    backward(roots, seeds);
    gradient = std::move(end->gradient);
  }
  if (gradient.defined()) {
    backward({trunk_output}, {gradient});
  }
  return losses;
}

std::vector<at::Tensor> backward_each(const std::function<at::Tensor()>& trunk, const std::vector<Function>& heads,
                                      const std::vector<Function>& losses, GradScaler* scaler) {
  if (heads.size() != losses.size()) {
    throw ConfigError(
        fmt::format("backward_each: {} heads and {} losses; give one loss a head", heads.size(), losses.size()));
  }
  std::vector<Function> whole;
  for (size_t i = 0; i < heads.size(); ++i) {
    whole.emplace_back([&head = heads[i], &loss = losses[i]](at::Tensor h) { return loss(head(std::move(h))); });
  }
  const at::AutoGradMode enable_grad(true);
  return backward_each(trunk(), whole, scaler);
}

}  // namespace snug
