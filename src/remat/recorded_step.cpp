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

// A step that is tried: `tape` is null if the step is as it is, `recorder` is null if nothing is recorded.
struct TriedStep {
  const std::function<at::Tensor()>& forward_and_loss;
  c10::Device device;
  std::shared_ptr<OpTape> tape = nullptr;
  TapeRecorder* recorder = nullptr;
};

at::Tensor run_forward(const TriedStep& step) {
  if (step.tape == nullptr) {
    return checked_loss(step.forward_and_loss(), step.device);
  }
  const PolicyScope saved(step.tape);
  const OperatorScope operators(*step.tape);
  return checked_loss(step.forward_and_loss(), step.device);
}

void stop(const TriedStep& step) {
  if (step.recorder != nullptr) {
    step.recorder->stop();
  }
}

// Returns the seconds of the forward and the backward pass.
double run_step(const TriedStep& step, EffectJournal& journal, const RecordedStep& options) {
  const Bytes level = live_bytes(step.device);
  std::optional<MemoryLimit> limit(std::in_place, step.device, level + options.memory);
  EffectJournal::Run effects(journal);
  OperatorClock clock(step.device);
  const auto wait_for_device = [&] {
    clock.mark();
    clock.finish({});
  };
  wait_for_device();
  const OperatorClock::Mark began = clock.mark();
  const at::Tensor loss = run_forward(step);
  const OperatorClock::Span forward = {began, clock.mark()};
  if (step.tape != nullptr && step.tape->missed_operators()) {
    throw ConfigError(fmt::format("Planning: {}; keep that library's modes out of the step", step.tape->deviation()));
  }
  if (step.tape != nullptr) {
    step.tape->close();
  }
  const std::vector<at::Tensor> leaves = leaves_of(loss);
  if (options.parameters != nullptr) {
    options.parameters->check(leaves, journal);
  }
  if (!options.goes_backward) {
    stop(step);
    return clock.host_seconds(forward);
  }
  refuse_gradient_hooks(leaves);
  limit.reset();
  const int64_t copies_before = journal.bytes();
  journal.note_gradients(leaves);
  limit.emplace(step.device, level + Bytes(journal.bytes() - copies_before) + options.memory);
  if (step.recorder != nullptr) {
    step.recorder->begin_backward();
  }
  effects.begin_backward();
  const OperatorClock::Mark back = clock.mark();
  {
    const auto note_writes = c10::make_scope_exit([&] {
      if (step.tape != nullptr) {
        step.tape->note_writes_in_backward();
      }
    });
    go_backward(loss);
  }
  if (step.recorder == nullptr) {  // a recorder's last span is the host's alone
    wait_for_device();
  }
  const OperatorClock::Span backward = {back, clock.mark()};
  if (step.tape != nullptr) {
    step.tape->backward_is_over();
  }
  stop(step);
  return clock.host_seconds(forward) + clock.host_seconds(backward);
}

double run_and_take_back(const TriedStep& step, EffectJournal& journal, const RecordedStep& options) {
  double seconds = 0;
  std::exception_ptr failure;
  try {
    seconds = run_step(step, journal, options);
  } catch (...) {
    failure = std::current_exception();
  }
  at::autocast::clear_cache();
  if (step.tape != nullptr) {
    step.tape->forget_listener();
    step.tape->close();  // after a failure, too: the program may keep a result, with the graph and the tape, for long
  }
  if (options.parameters != nullptr && step.tape != nullptr) {
    options.parameters->note(*step.tape, journal);
  }
  journal.take_back();
  if (failure) {
    std::rethrow_exception(failure);
  }
  return seconds;
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
  run_and_take_back({forward_and_loss, recorder.device(), tape, &recorder}, journal, options);
}

double time_step(const std::function<at::Tensor()>& forward_and_loss, std::shared_ptr<const TapeSchedule> schedule,
                 c10::Device device, EffectJournal& journal, RecordedStep options) {
  const auto tape = schedule != nullptr ? std::make_shared<OpTape>(std::move(schedule)) : nullptr;
  return run_and_take_back({forward_and_loss, device, tape}, journal, options);
}

}  // namespace snug::detail
