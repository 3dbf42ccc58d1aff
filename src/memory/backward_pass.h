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

/// Sees the backward passes that begin on the observer's thread and accumulate gradients, before each pass runs. snug's
/// own calls of backward() are seen. Python's backward() is not seen at the place of the program's call.
class BackwardObserver {
 public:
  virtual ~BackwardObserver() = default;
  virtual void before_pass(const torch::autograd::edge_list& roots) = 0;
};

/// Shows the thread's passes to `observer` until the end of the scope. Scopes end in the reverse of the order in which
/// the scopes began.
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

/// Calls the observers of the thread; the engine is the only caller.
void show_pass_to_observers(const torch::autograd::edge_list& roots);

/// Keeps backward passes on the thread on which the passes begin, until the end of the scope. For every device but the
/// CPU, LibTorch by itself runs passes on one thread per device. A device's thread lacks the policies and scopes of the
/// first thread, and the first thread waits for the pass in any case.
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

/// The number of the innermost backward pass that runs on the calling thread, different for each pass; -1 if none runs.
int current_pass();

/// The number of the calling thread's outermost pass, inside which all other passes of the thread run; -1 if none runs.
int outermost_pass();

/// Called by the engine when a pass begins: remembers the pass around the new pass, until the end of the scope.
Replaced<int> pass_begins();

/// The leaves into which a backward pass from `roots` accumulates.
std::vector<at::Tensor> leaves_of(const torch::autograd::edge_list& roots);
/// The leaves into which a backward pass from `loss` accumulates.
std::vector<at::Tensor> leaves_of(const at::Tensor& loss);

/// Calls loss.backward() on this thread. If the call throws, no tensor of the pass stays alive (see ForwardingEngine).
void go_backward(const at::Tensor& loss);

}  // namespace snug::detail
