#pragma once
// How snug runs backward passes.

#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>

namespace snug::detail {

/// While it lives, backward passes that begin on this thread stay on it. LibTorch would go to a thread of its own for each device but the CPU, where
/// policies and scopes of this thread are not known; this one waits for it anyway.
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

/// A number of its own for the backward pass that runs on this thread, the innermost one; -1 if none does.
int current_pass();

/// loss.backward(), on this thread. If it throws, nothing of it stays alive (see ForwardingEngine).
void go_backward(const at::Tensor& loss);

}  // namespace snug::detail
