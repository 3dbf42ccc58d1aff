#include "src/memory/backward_pass.h"

#include <utility>

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "src/memory/saved_tensor_policy.h"

// LibTorch numbers the backward passes that run. Tried on torch 2.11.0 and 2.13.0.

namespace snug::detail {

namespace {

thread_local int pass_around = -1;  // the outermost pass, while other passes run inside of the outermost pass
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

Replaced<int> pass_begins() { return {pass_around, outermost_pass()}; }

std::vector<at::Tensor> leaves_of(const torch::autograd::edge_list& roots) {
  std::vector<at::Tensor> leaves;
  ska::flat_hash_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::edge_list*> pending{&roots};
  while (!pending.empty()) {
    const torch::autograd::edge_list& edges = *pending.back();
    pending.pop_back();
    for (const torch::autograd::Edge& edge : edges) {
      if (!edge.is_valid() || !seen.insert(&*edge.function).second) {
        continue;
      }
      const auto& next = edge.function->next_edges();
      if (!next.empty()) {
        pending.push_back(&next);
      } else if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&*edge.function)) {
        leaves.push_back(leaf->variable);
      }
    }
  }
  return leaves;
}

std::vector<at::Tensor> leaves_of(const at::Tensor& loss) {
  return loss.grad_fn() ? leaves_of(torch::autograd::edge_list{torch::autograd::Edge(loss.grad_fn(), 0)})
                        : std::vector<at::Tensor>();
}

void go_backward(const at::Tensor& loss) {
  install_engine();
  const BackwardOnThisThread here;
  loss.backward();
}

}  // namespace snug::detail
