#pragma once
// ForwardingEngine: an autograd engine that leaves all work to another one. LibTorch keeps threads and queues for one
// engine per process. A library that wants to take part in an engine's decisions therefore puts itself in front of the
// engine that it finds: LibTorch's own, Python's, or another library's.

#include <memory>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/version.h>

namespace snug::detail {

/// The kind of pointer depends on LibTorch's version.
using NodePointer = decltype(torch::autograd::Edge::function);

/// Never destroyed, as threads of the other engine may outlive the program's end. Tried on torch 2.13.0; the interface
/// is that of 2.11 to 2.15.
class ForwardingEngine : public torch::autograd::Engine {
 public:
  explicit ForwardingEngine(Engine& inner) : inner_(inner) {}

  Engine& inner() const { return inner_; }

  /// Runs a backward pass, which observers of the thread are shown if it accumulates gradients. If it fails, none of
  /// its gradients stays alive. By itself LibTorch keeps the gradients that were on their way to other nodes until the
  /// next pass begins on the thread, and those of devices' threads for an unknown time. Therefore empty passes follow a
  /// failed one, on this thread and on those, unless it ran inside another pass of this thread.
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override;

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, NodePointer root,
      torch::autograd::InputBuffer&& buffer) override;
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override;
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override;
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task, const NodePointer& node,
                           std::exception& error) override;
  void thread_init(int device, const std::shared_ptr<torch::autograd::ReadyQueue>& queue,
                   bool should_increment) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override;
#endif

 private:
  Engine& inner_;
};

}  // namespace snug::detail
