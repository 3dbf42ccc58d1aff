#pragma once
// ForwardingEngine: an autograd engine that leaves all work to another engine.
//
// Problem: snug must answer some of the questions that LibTorch asks the autograd engine, and must clean up after a
// failed backward pass.
// Options: replace the engine, change LibTorch, or forward to the engine. LibTorch keeps threads and queues for one
// engine per process, so a second complete engine is not possible, and snug runs on an unchanged LibTorch.
// Choice: a library that takes part in an engine's decisions puts itself in front of the engine that the library finds:
// LibTorch's engine, Python's engine, or another library's engine.
// Consequence: every virtual method of LibTorch's engine must be forwarded, and the list of virtual methods depends on
// LibTorch's version.

#include <memory>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/version.h>

namespace snug::detail {

/// The kind of pointer depends on LibTorch's version.
using NodePointer = decltype(torch::autograd::Edge::function);

/// Never destroyed, because threads of the other engine may outlive the program's end. Tried on torch 2.13.0; the
/// interface is the interface of 2.11 to 2.15.
class ForwardingEngine : public torch::autograd::Engine {
 public:
  explicit ForwardingEngine(Engine& inner) : inner_(inner) {}

  Engine& inner() const { return inner_; }

  /// Runs a backward pass. Observers of the thread are shown the pass if the pass accumulates gradients. If the pass
  /// fails, none of the pass's gradients stays alive. LibTorch by itself keeps two kinds of gradients after a failed
  /// pass:
  /// - gradients on the way to other nodes, until the next pass begins on the thread;
  /// - gradients of devices' threads, for an unknown time.
  ///
  /// Therefore empty passes follow a failed pass, on the calling thread and on the devices' threads. No empty pass
  /// follows if the failed pass ran inside another pass of the calling thread.
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
