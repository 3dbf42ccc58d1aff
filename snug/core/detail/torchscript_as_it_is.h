#pragma once

#include <torch/csrc/jit/python/update_graph_executor_opt.h>

namespace snug::detail {

/// At first TorchScript runs a function operator by operator, to profile it. Later it turns the function into a graph,
/// which saves other tensors in another order. While this object lives, functions that are no graph yet do not become
/// one on this thread.
class [[nodiscard]] TorchScriptAsItIs final {
 public:
  TorchScriptAsItIs() { torch::jit::setGraphExecutorOptimize(false); }
  ~TorchScriptAsItIs() { torch::jit::setGraphExecutorOptimize(before_); }
  TorchScriptAsItIs(const TorchScriptAsItIs&) = delete;
  TorchScriptAsItIs& operator=(const TorchScriptAsItIs&) = delete;

 private:
  bool before_ = torch::jit::getGraphExecutorOptimize();
};

}  // namespace snug::detail
