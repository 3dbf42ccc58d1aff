#include "src/remat/recorded_step.h"

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/gradient_hooks.h"
#include "src/memory/backward_pass.h"

namespace snug::detail {

namespace {

void refuse_gradient_hooks(const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    if (has_lasting_gradient_hook(leaf)) {
      throw ConfigError(
          "Planning: a parameter has a hook that runs when its gradient is complete, as StepInBackward sets; "
          "profiling would run it. Plan before it is set");
    }
  }
}

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

void run_step(const std::function<at::Tensor()>& forward_and_loss, const std::shared_ptr<OpTape>& tape,
              TapeRecorder& recorder, EffectJournal& journal, const RecordedStep& options) {
  const c10::Device device = recorder.device();
  const Bytes level = live_bytes(device);
  std::optional<MemoryLimit> limit(std::in_place, device, level + options.memory);
  EffectJournal::Run effects(journal);
  at::Tensor loss;
  {
    const PolicyScope saved(tape);
    const OperatorScope operators(*tape);
    loss = checked_loss(forward_and_loss(), device);
  }
  if (tape->missed_operators()) {
    throw ConfigError(fmt::format("Planning: {}; keep that library's modes out of the step", tape->deviation()));
  }
  tape->close();
  const std::vector<at::Tensor> leaves = leaves_of(loss);
  if (options.parameters != nullptr) {
    options.parameters->check(leaves, journal);
  }
  if (!options.goes_backward) {
    recorder.stop();
    return;
  }
  refuse_gradient_hooks(leaves);
  limit.reset();
  const int64_t copies_before = journal.bytes();
  journal.note_gradients(leaves);
  limit.emplace(device, level + Bytes(journal.bytes() - copies_before) + options.memory);
  recorder.begin_backward();
  effects.begin_backward();
  {
    const auto note_writes = c10::make_scope_exit([&] { tape->note_writes_in_backward(); });
    go_backward(loss);
  }
  tape->backward_is_over();
  recorder.stop();
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
                 TapeRecorder& recorder, EffectJournal& journal, RecordedStep options) {
  std::exception_ptr failure;
  try {
    run_step(forward_and_loss, tape, recorder, journal, options);
  } catch (...) {
    failure = std::current_exception();
  }
  at::autocast::clear_cache();
  tape->forget_listener();
  tape->close();  // after a failure, too: the program may keep a result, with the graph and the tape, for long
  if (options.parameters != nullptr) {
    options.parameters->note(*tape, journal);
  }
  journal.take_back();
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace snug::detail
