#pragma once
// How snug runs backward passes.

#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>

namespace snug::detail {

/// While it lives, backward passes that begin on this thread stay on it. LibTorch would run them on one thread per
/// device for every device but the CPU. Policies and scopes of this thread are unknown there, and this thread waits for
/// the pass in any case.
class [[nodiscard]] BackwardOnThisThread final {
 public:
  BackwardOnThisThread() : before_(state().get_multithreading_enabled()) { state().set_multithreading_enabled(false); }
  ~BackwardOnThisThread() { state().set_multithreading_enabled(before_); }
  BackwardOnThisThread(const BackwardOnThisThread&) = delete;
  BackwardOnThisThread& operator=(const BackwardOnThisThread&) = delete;

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }

  bool before_;
};

/// The number of the innermost backward pass that runs on this thread, different for each pass; -1 if none runs.
int current_pass();

/// The number of the pass that all others of this thread run inside of; -1 if none runs.
int outermost_pass();

/// Made by the engine when a pass begins: remembers which one it is inside of.
class [[nodiscard]] PassBegins final {
 public:
  PassBegins();
  ~PassBegins();
  PassBegins(const PassBegins&) = delete;
  PassBegins& operator=(const PassBegins&) = delete;

 private:
  int before_;
};

/// loss.backward(), on this thread. If it throws, no tensor of the pass stays alive (see ForwardingEngine).
void go_backward(const at::Tensor& loss);

}  // namespace snug::detail
