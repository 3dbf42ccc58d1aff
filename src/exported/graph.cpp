#include "src/exported/graph.h"

namespace snug::detail {
namespace {

void mark_arguments(std::vector<GraphArgument>& arguments, std::vector<bool>& is_used) {
  for (auto argument = arguments.rbegin(); argument != arguments.rend(); ++argument) {
    mark_arguments(argument->items, is_used);
    if (argument->kind == GraphArgument::Kind::Value) {
      argument->is_last_use = !is_used[static_cast<size_t>(argument->slot)];
      is_used[static_cast<size_t>(argument->slot)] = true;
    }
  }
}

void forget_unused(std::vector<int>& slots, const std::vector<bool>& is_used) {
  for (int& slot : slots) {
    slot = slot >= 0 && is_used[static_cast<size_t>(slot)] ? slot : -1;
  }
}

}  // namespace

void mark_last_uses(OperatorGraph& graph) {
  std::vector<bool> is_used(static_cast<size_t>(graph.slots), false);
  mark_arguments(graph.outputs, is_used);
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    forget_unused(node->results, is_used);
    mark_arguments(node->arguments, is_used);
  }
  forget_unused(graph.inputs, is_used);
}

int64_t count_operators(const OperatorGraph& graph) {
  int64_t total = 0;
  for (const GraphNode& node : graph.nodes) {
    total += static_cast<int64_t>(node.graphs.empty());
    for (const auto& inner : node.graphs) {
      total += count_operators(*inner);
    }
  }
  return total;
}

}  // namespace snug::detail
