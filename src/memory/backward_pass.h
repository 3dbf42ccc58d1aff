#pragma once
// How snug runs backward passes.

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>

#include "src/core/replaced.h"

namespace torch::autograd {
struct Edge;
using edge_list = std::vector<Edge>;
}  // namespace torch::autograd

namespace snug::detail {

/// Is shown the backward passes that begin on this thread and accumulate gradients, before each of them runs. Python's
/// backward() is not seen where the program calls it; snug's own calls are.
class BackwardObserver {
 public:
  virtual ~BackwardObserver() = default;
  virtual void before_pass(const torch::autograd::edge_list& roots) = 0;
};

/// While it lives, `observer` is shown this thread's passes. Scopes end in the reverse of the order in which they
/// began.
class [[nodiscard]] BackwardObserverScope final {
 public:
  explicit BackwardObserverScope(BackwardObserver& observer);
  ~BackwardObserverScope();
  BackwardObserverScope(const BackwardObserverScope&) = delete;
  BackwardObserverScope& operator=(const BackwardObserverScope&) = delete;

 private:
  friend void show_pass_to_observers(const torch::autograd::edge_list& roots);
  BackwardObserver& observer_;
  BackwardObserverScope* outside_;
};

/// For the engine.
void show_pass_to_observers(const torch::autograd::edge_list& roots);

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

 private:
  Replaced<int> around_;
};

/// The leaves into which a backward pass from `roots` accumulates.
std::vector<at::Tensor> leaves_of(const torch::autograd::edge_list& roots);
/// From `loss`.
std::vector<at::Tensor> leaves_of(const at::Tensor& loss);

/// loss.backward(), on this thread. If it throws, no tensor of the pass stays alive (see ForwardingEngine).
void go_backward(const at::Tensor& loss);

}  // namespace snug::detail
