#include "snug/remat/detail/recorded_step.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "snug/core/detail/gradient_hooks.h"
#include "snug/core/error.h"
#include "snug/memory/detail/backward_pass.h"
#include "snug/memory/limit.h"

namespace snug::detail {

std::vector<at::Tensor> leaves_of(const at::Tensor& loss) {
  std::vector<at::Tensor> leaves;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> pending;
  const auto visit = [&](const auto& node) {
    if (node && seen.insert(&*node).second) {
      pending.push_back(&*node);
    }
  };
  visit(loss.grad_fn());
  while (!pending.empty()) {
    torch::autograd::Node* node = pending.back();
    pending.pop_back();
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      leaves.push_back(leaf->variable);
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function);
    }
  }
  return leaves;
}

namespace {

bool is_all_zero(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense()) {
    return false;
  }
  if (!tensor.is_cpu()) {
    return !tensor.as_strided({tensor.numel()}, {1}).view(at::kByte).any().item<bool>();
  }
  const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
  return std::all_of(bytes, bytes + tensor.nbytes(), [](char c) { return c == 0; });
}

// Keeps the gradients of a loss's leaves and puts them back. Zeros need no copy.
class GradientsBefore {
 public:
  explicit GradientsBefore(const std::vector<at::Tensor>& leaves) {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& leaf : leaves) {
      if (has_lasting_gradient_hook(leaf)) {
        throw ConfigError(
            "profile_step: a parameter has a hook that runs when its gradient is complete, as StepInBackward sets; "
            "profiling would run it. Plan before it is set");
      }
      const at::Tensor& grad = leaf.grad();
      before_.push_back({leaf, grad, grad.defined() && !is_all_zero(grad) ? grad.clone() : at::Tensor()});
    }
  }
  void restore() {
    const c10::NoGradGuard no_grad;
    for (One& one : before_) {
      if (one.values.defined()) {
        one.gradient.copy_(one.values);
      } else if (one.gradient.defined()) {
        one.gradient.zero_();
      }
      one.leaf.mutable_grad() = one.gradient;
    }
  }

 private:
  struct One {
    at::Tensor leaf, gradient, values;
  };
  std::vector<One> before_;
};

at::Tensor checked_loss(at::Tensor loss, c10::Device device) {
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad() || loss.is_leaf()) {
    throw ConfigError(
        "plan_activations: the callable must return the loss, a scalar that was computed from what requires a "
        "gradient; it returned " +
        (loss.defined() ? fmt::format("a tensor of {} elements{}", loss.numel(),
                                      loss.requires_grad() && !loss.is_leaf() ? "" : " without a graph")
                        : std::string("an undefined one")));
  }
  if (loss.device() != device) {
    throw OtherDevice(loss.device());
  }
  return loss;
}

// So many bytes above a level.
Bytes above(Bytes level, Bytes bytes) {
  const bool is_unlimited = bytes.count() > std::numeric_limits<int64_t>::max() - level.count();
  return is_unlimited ? Bytes::unlimited() : Bytes(level.count() + bytes.count());
}

}  // namespace

c10::Device likely_device() {
  const auto accelerator = at::getAccelerator();
  if (accelerator) {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(accelerator);
    if (hooks.deviceCount() > 0 && hooks.hasPrimaryContext(hooks.getCurrentDevice())) {
      return {*accelerator, hooks.getCurrentDevice()};
    }
  }
  return c10::kCPU;
}

void record_step(const std::function<at::Tensor()>& forward_and_loss, const std::shared_ptr<OpTape>& tape,
                 TapeRecorder& recorder, RecordedStep options) {
  const c10::Device device = recorder.device();
  const Bytes level = live_bytes(device);
  std::optional<GradientsBefore> gradients;
  struct Restore {
    std::optional<GradientsBefore>& gradients;
    TapeRecorder& recorder;
    OpTape& tape;
    InitialisedParameters* parameters;
    ~Restore() {
      tape.forget_listener();
      if (parameters != nullptr) {
        parameters->note(tape, recorder);
      }
      recorder.restore_outside();
      if (gradients) {
        gradients->restore();
      }
    }
  } restore{gradients, recorder, *tape, options.parameters};
  std::optional<MemoryLimit> limit(std::in_place, device, above(level, options.memory));
  at::Tensor loss;
  {
    const PolicyScope saved(std::make_shared<TapePolicy>(tape));
    const OperatorScope operators(*tape);
    loss = checked_loss(forward_and_loss(), device);
  }
  if (tape->missed_operators()) {
    throw ConfigError(fmt::format("profile_step: {}; keep that library's modes out of the step", tape->deviation()));
  }
  tape->close();
  const std::vector<at::Tensor> leaves = leaves_of(loss);
  if (options.parameters != nullptr) {
    options.parameters->check(leaves, recorder);
  }
  if (!options.goes_backward) {
    recorder.stop();
    tape->forget_listener();
    return;
  }
  limit.reset();
  recorder.pause(true);
  const Bytes before_copies = live_bytes(device);
  gradients.emplace(leaves);
  const int64_t copies = live_bytes(device).count() - before_copies.count();
  recorder.pause(false);
  limit.emplace(device, above(Bytes(level.count() + copies), options.memory));
  recorder.begin_backward();
  go_backward(loss);
  tape->backward_is_over();
  recorder.stop();
}

}  // namespace snug::detail
