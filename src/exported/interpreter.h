#pragma once
// Runs a graph, operator by operator, through LibTorch's dispatcher: autograd, autocast and whatever else hooks in
// there see what they would see of the same model in C++.

#include <vector>

#include "src/exported/graph.h"

namespace snug::detail {

struct Interpreter {
  c10::Device home = c10::kCPU;  // where the model was at export
  c10::Device here = c10::kCPU;  // where it is now: devices of `home` in the graph mean this one
  bool autocast_cache = true;    // whatever the file says

  /// What the graph returns. Throws what the operators throw, with the place in the Python program;
  /// c10::OutOfMemoryError as it is.
  std::vector<c10::IValue> run(const OperatorGraph& graph, std::vector<c10::IValue> inputs) const;

 private:
  c10::IValue make(const GraphArgument& argument, std::vector<c10::IValue>& values) const;
  void run_node(const GraphNode& node, std::vector<c10::IValue>& stack) const;
  void run_region(const GraphNode& node, std::vector<c10::IValue>& stack) const;
  void run_branch(const OperatorGraph& graph, std::vector<c10::IValue>& stack) const;
};

}  // namespace snug::detail
