#include "src/memory/forwarding_engine.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

#include "src/memory/backward_pass.h"

namespace snug::detail {

using torch::autograd::GraphTask;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

// Does nothing. Threads run the nodes with the smallest sequence numbers last.
struct LastNode final : Node {
  explicit LastNode(const at::Tensor& input) : Node(/*sequence_nr=*/0) { add_input_metadata(input); }
  variable_list apply(variable_list&&) override { return {}; }
};

template <typename Pointer>
Pointer owning(Node* node) {
  if constexpr (requires { Pointer::unsafe_steal_from_new(node); }) {
    return Pointer::unsafe_steal_from_new(node);  // counts the node as owned once, as reclaim() expects
  } else {
    return Pointer(node);
  }
}

// A tensor on each device, but the CPU, that took part in a pass: a leaf, or a gradient with which the pass began.
variable_list one_of_each_device(const torch::autograd::edge_list& roots, const variable_list& inputs) {
  variable_list found;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_cpu() && std::none_of(found.begin(), found.end(), [&](const at::Tensor& one) {
          return one.device() == tensor.device();
        })) {
      found.push_back(tensor);
    }
  };
  std::for_each(inputs.begin(), inputs.end(), add);
  const variable_list leaves = leaves_of(roots);
  std::for_each(leaves.begin(), leaves.end(), add);
  return found;
}

// A device's thread lets go of a pass only after reporting the error.
void wait_for_device_threads(torch::autograd::Engine& engine, const variable_list& one_of_each) {
  for (const at::Tensor& tensor : one_of_each) {
    engine.execute({{owning<NodePointer>(new LastNode(tensor)), 0}}, {tensor}, /*keep_graph=*/false,
                   /*create_graph=*/false, /*accumulate_grad=*/true, {});
  }
}

}  // namespace

variable_list ForwardingEngine::execute(const torch::autograd::edge_list& roots, const variable_list& inputs,
                                        bool keep_graph, bool create_graph, bool accumulate_grad,
                                        const torch::autograd::edge_list& outputs) {
  if (accumulate_grad) {
    show_pass_to_observers(roots);
  }
  const bool is_outermost = current_pass() < 0;
  const Replaced<int> around = pass_begins();
  try {
    return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  } catch (...) {
    if (is_outermost) {
      try {
        inner_.execute({}, {}, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
        if (c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
          wait_for_device_threads(inner_, one_of_each_device(roots, inputs));
        }
      } catch (...) {  // the first error is the error to report
      }
    }
    throw;
  }
}

c10::intrusive_ptr<at::ivalue::Future> ForwardingEngine::execute_with_graph_task(
    const std::shared_ptr<GraphTask>& task, NodePointer root, torch::autograd::InputBuffer&& buffer) {
  return inner_.execute_with_graph_task(task, std::move(root), std::move(buffer));
}

std::unique_ptr<torch::autograd::AnomalyMetadata> ForwardingEngine::make_anomaly_metadata() {
  return inner_.make_anomaly_metadata();
}

std::unique_ptr<torch::autograd::SavedVariableHooks> ForwardingEngine::get_default_saved_variable_hooks() {
  return inner_.get_default_saved_variable_hooks();
}

void ForwardingEngine::thread_on_exception(const std::shared_ptr<GraphTask>& task, const NodePointer& node,
                                           std::exception& error) {
  inner_.thread_on_exception(task, node, error);
}

void ForwardingEngine::thread_init(int device, const std::shared_ptr<torch::autograd::ReadyQueue>& queue,
                                   bool should_increment) {
  inner_.thread_init(device, queue, should_increment);
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> ForwardingEngine::get_node_creation_hooks() {
  return inner_.get_node_creation_hooks();
}
#endif

}  // namespace snug::detail
