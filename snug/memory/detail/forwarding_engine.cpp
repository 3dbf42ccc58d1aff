#include "snug/memory/detail/forwarding_engine.h"

#include <utility>

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

#include "snug/memory/detail/backward_pass.h"

namespace snug::detail {

using torch::autograd::GraphTask;
using torch::autograd::variable_list;

variable_list ForwardingEngine::execute(const torch::autograd::edge_list& roots, const variable_list& inputs,
                                        bool keep_graph, bool create_graph, bool accumulate_grad,
                                        const torch::autograd::edge_list& outputs) {
  const bool is_outermost = current_pass() < 0;
  try {
    return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  } catch (...) {
    if (is_outermost) {
      try {
        inner_.execute({}, {}, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
      } catch (...) {  // the first error is the one to tell
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
