#pragma once
// A graph of operators as plain data: what graph_reader.h makes of the file, and interpreter.h runs. Values are
// numbered: a slot holds one from the node that makes it to the argument that is its last use.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "src/exported/python_numbers.h"

namespace snug::detail {

struct GraphArgument {
  enum class Kind { Constant, Device, Value, List } kind = Kind::Constant;
  c10::IValue constant;              // Constant; Device, as it was at export
  int slot = -1;                     // Value
  bool is_last_use = false;          // Value: it is moved out of its slot
  c10::TypePtr type = nullptr;       // Value: the schema's, null where there is none; List: of the elements
  std::vector<GraphArgument> items;  // List
};

struct OperatorGraph;

struct GraphNode {
  enum class Kind {
    Operator,  // of the dispatcher
    Function,  // of Python, on sizes
    GradMode,  // arguments: enabled; then those of the one graph in it
    Autocast,  // arguments: device type, dtype, enabled, cache enabled; then those of the graph
    Cond,      // arguments: which of two graphs; then those of both
    Inline     // arguments: those of the graph
  } kind = Kind::Operator;
  std::optional<c10::OperatorHandle> op;
  const PythonFunction* function = nullptr;
  std::vector<GraphArgument> arguments;
  std::vector<std::unique_ptr<OperatorGraph>> graphs;
  std::vector<int> results;     // slots; -1: nobody uses it
  bool result_is_list = false;  // the results are the elements of one list
  std::string where;            // for messages: operator, layer and Python line

  /// The first arguments of the kinds with graphs, which are not the graph's.
  size_t settings() const { return kind == Kind::Autocast ? 4 : kind == Kind::GradMode || kind == Kind::Cond ? 1 : 0; }
};

struct OperatorGraph {
  int slots = 0;
  std::vector<int> inputs;  // slots; -1: nobody uses it
  std::vector<GraphNode> nodes;
  std::vector<GraphArgument> outputs;
};

/// Marks each value's last use, and forgets the results that nobody uses.
void mark_last_uses(OperatorGraph& graph);

/// Nodes that are no regions, in `graph` and all graphs in it.
int64_t count_operators(const OperatorGraph& graph);

}  // namespace snug::detail
