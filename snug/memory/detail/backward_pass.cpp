#include "snug/memory/detail/backward_pass.h"

#include <utility>

#include <torch/csrc/autograd/graph_task.h>

#include "snug/memory/detail/saved_tensor_policy.h"

// LibTorch numbers the backward passes that run. Tried on torch 2.11.0 and 2.13.0.

namespace snug::detail {

namespace {

thread_local int pass_around = -1;  // the outermost one, while others run inside of it
thread_local BackwardObserverScope* innermost_observer = nullptr;

}  // namespace

BackwardObserverScope::BackwardObserverScope(BackwardObserver& observer)
    : observer_(observer), outside_(std::exchange(innermost_observer, this)) {
  install_engine();
}

BackwardObserverScope::~BackwardObserverScope() { innermost_observer = outside_; }

void show_pass_to_observers(const torch::autograd::edge_list& roots) {
  for (BackwardObserverScope* scope = innermost_observer; scope != nullptr; scope = scope->outside_) {
    scope->observer_.before_pass(roots);
  }
}

int current_pass() { return torch::autograd::get_current_graph_task_id(); }

int outermost_pass() { return pass_around >= 0 ? pass_around : current_pass(); }

PassBegins::PassBegins() : before_(std::exchange(pass_around, outermost_pass())) {}

PassBegins::~PassBegins() { pass_around = before_; }

void go_backward(const at::Tensor& loss) {
  install_engine();
  const BackwardOnThisThread here;
  loss.backward();
}

}  // namespace snug::detail
