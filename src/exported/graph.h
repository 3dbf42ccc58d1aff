#pragma once
// A graph of operators as plain data. graph_reader.h makes the graph from the file, and interpreter.h runs the graph.
// Values have numbers: a slot keeps a value from the node that makes the value to the argument of the last use.

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
  c10::IValue constant;              // Constant; Device: the device at export
  int slot = -1;                     // Value
  bool is_last_use = false;          // Value: the value is moved out of its slot
  c10::TypePtr type = nullptr;       // Value: the schema's, or null; List: the elements' type
  std::vector<GraphArgument> items;  // List
};

struct OperatorGraph;

struct GraphNode {
  enum class Kind {
    Operator,  // an operator of the dispatcher
    Function,  // a function of Python on sizes
    GradMode,  // arguments: enabled; then the arguments of the inner graph
    Autocast,  // arguments: device type, dtype, enabled, cache enabled; then the graph's arguments
    Cond,      // arguments: the choice between two graphs; then the arguments of both graphs
    Inline     // arguments: the graph's arguments
  } kind = Kind::Operator;
  std::optional<c10::OperatorHandle> op;
  const PythonFunction* function = nullptr;
  std::vector<GraphArgument> arguments;
  std::vector<std::unique_ptr<OperatorGraph>> graphs;
  std::vector<int> results;     // slots; -1: nobody uses it
  bool result_is_list = false;  // the results are the elements of a list
  std::string where;            // for messages: operator, layer and Python line

  /// For kinds with graphs: the number of first arguments that do not belong to the inner graphs.
  size_t settings() const { return kind == Kind::Autocast ? 4 : kind == Kind::GradMode || kind == Kind::Cond ? 1 : 0; }
};

struct OperatorGraph {
  int slots = 0;
  std::vector<int> inputs;  // slots; -1: nobody uses it
  std::vector<GraphNode> nodes;
  std::vector<GraphArgument> outputs;
};

/// Marks each value's last use, and forgets results without a use.
void mark_last_uses(OperatorGraph& graph);

/// The number of nodes in `graph` and in all its inner graphs, regions excluded.
int64_t count_operators(const OperatorGraph& graph);

}  // namespace snug::detail
