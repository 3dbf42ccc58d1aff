#pragma once
// Runs a graph, operator by operator, through LibTorch's dispatcher: autograd, autocast and all other users of the
// dispatcher see the same calls as for a C++ model.

#include <vector>

#include "src/exported/graph.h"

namespace snug::detail {

struct Interpreter {
  c10::Device home = c10::kCPU;  // the model's device at export
  c10::Device here = c10::kCPU;  // the model's device now; `home` in the graph means `here`
  bool autocast_cache = true;    // true: regions use autocast's cache, whatever the file says

  /// Returns the graph's outputs. Throws the exceptions of operators, with the position in the Python program;
  /// c10::OutOfMemoryError unchanged.
  std::vector<c10::IValue> run(const OperatorGraph& graph, std::vector<c10::IValue> inputs) const;

 private:
  c10::IValue make(const GraphArgument& argument, std::vector<c10::IValue>& values) const;
  void run_node(const GraphNode& node, std::vector<c10::IValue>& stack) const;
  void run_region(const GraphNode& node, std::vector<c10::IValue>& stack) const;
  void run_branch(const OperatorGraph& graph, std::vector<c10::IValue>& stack) const;
};

}  // namespace snug::detail
