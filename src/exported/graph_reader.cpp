// How a graph in a file becomes a graph that runs
//
// Problem: the file names operators, values and arguments in JSON, for the torch version that wrote the file. A step
// may run the graph many times. The file may be of unknown origin.
//
// Options: look names up in each run, or once when the file is read.
//
// Choice: once. Operators are found in the dispatcher, names become slots, and arguments are made fit for the schemas
// of this LibTorch (argument_reader.h). Arguments that the file leaves out get the schema's defaults.
//
// Consequences:
// - A run needs no look at JSON or names (interpreter.cpp).
// - Errors of the file appear when the file is read, with the operator, its layer and its Python line.
// - Operators that reach beyond tensors are refused, and so are Python functions other than functions on sizes.
// - Regions (gradient mode, autocast, cond, calls of inner graphs) have graphs of their own, and each inner graph has a
//   reader of its own.

#include "src/exported/graph_reader.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include <ATen/core/jit_type.h>
#include <fmt/format.h>

#include "src/exported/argument_reader.h"

namespace snug::detail {
namespace {

// The path of the innermost module in "key,path,type;key,path,type".
std::string layer_of(const std::string& modules) {
  const std::string innermost = modules.substr(modules.rfind(';') + 1);
  const size_t first = innermost.find(','), last = innermost.rfind(',');
  return first == last ? "" : innermost.substr(first + 1, last - first - 1);
}

// The innermost frame of a traceback, without the frame's source.
std::string line_of(const std::string& traceback) {
  const size_t begin = traceback.rfind("File \"");
  return begin == std::string::npos ? "" : traceback.substr(begin, traceback.find('\n', begin) - begin);
}

// " [in torch.ops.aten.linear.default, layer net.fc1, from File "model.py", line 12, in forward]": layer and line
// appear if the file has them.
std::string place_of_node(const ExportJson& node) {
  const ExportJson metadata = node.value("metadata", ExportJson::object());
  const std::string layer = layer_of(metadata.value("nn_module_stack", "")),
                    line = line_of(metadata.value("stack_trace", ""));
  return fmt::format(" [in {}{}{}]", node.at("target").get<std::string>(), layer.empty() ? "" : ", layer " + layer,
                     line.empty() ? "" : ", from " + line);
}

// Whether the operator reaches beyond tensors. A model has no use for such operators; a file of unknown origin may.
bool is_refused(const std::string& name) { return name == "aten::from_file"; }

c10::OperatorHandle operator_named(std::string_view target) {
  const size_t first = target.find('.'), last = target.rfind('.');
  if (first == std::string_view::npos || first == last) {
    throw CorruptFile(fmt::format("'{}' is no name of an operator", target));
  }
  const std::string name = fmt::format("{}::{}", target.substr(0, first), target.substr(first + 1, last - first - 1));
  const std::string overload(target.substr(last + 1));
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload == "default" ? "" : overload});
  if (!found || is_refused(name)) {
    throw ConfigError(
        fmt::format("{} the operator {}.{}; if it is your own or a Python package's, link a library that "
                    "registers it by TORCH_LIBRARY, "
                    "with a kernel for Autograd",
                    found ? "exported models may not use" : "this program lacks", name, overload));
  }
  return *found;
}

// Reads a single graph. Inner graphs have readers of their own.
class GraphReader {
 public:
  std::unique_ptr<OperatorGraph> read(const ExportJson& json) {
    for (const ExportJson& input : json.at("inputs")) {
      graph_->inputs.push_back(values_.new_slot(name_of_value(input)));
    }
    for (const ExportJson& node : json.at("nodes")) {
      const std::string where = place_of_node(node);
      try {
        read_node(node, where);
      } catch (const ConfigError& error) {
        throw ConfigError(error.what() + where);
      } catch (const CorruptFile& error) {
        throw CorruptFile(error.what() + where);
      }
    }
    for (const ExportJson& output : json.at("outputs")) {
      graph_->outputs.push_back(values_.argument_of(output));
    }
    graph_->slots = values_.slots();
    mark_last_uses(*graph_);
    return std::move(graph_);
  }

 private:
  void read_node(const ExportJson& json, const std::string& where) {
    const std::string target = json.at("target");
    const ExportJson& inputs = json.at("inputs");
    constexpr std::string_view kOperators = "torch.ops.", kRegions = "torch.ops.higher_order.";
    if (target == "torch.ops.aten._assert_tensor_metadata.default") {
      return;  // under autocast dtypes may differ from export; the guarded aten::to checks by itself
    }
    GraphNode node;
    node.where = where;
    if (target.starts_with(kRegions)) {
      read_region(node, target.substr(kRegions.size()), inputs);
    } else if (target.starts_with(kOperators)) {
      read_operator(node, target.substr(kOperators.size()), inputs);
    } else {
      read_function(node, target, inputs);
    }
    read_results(node, json.at("outputs"));
    graph_->nodes.push_back(std::move(node));
  }

  void read_operator(GraphNode& node, const std::string& target, const ExportJson& inputs) {
    node.op = operator_named(target);
    size_t used = 0;
    for (const c10::Argument& wanted : node.op->schema().arguments()) {
      const auto found = std::find_if(inputs.begin(), inputs.end(),
                                      [&](const ExportJson& input) { return input.at("name") == wanted.name(); });
      if (found != inputs.end()) {
        ++used;
        node.arguments.push_back(values_.argument_of(found->at("arg"), wanted.type()));
      } else if (wanted.default_value() || wanted.type()->kind() == c10::TypeKind::OptionalType) {
        node.arguments.push_back(constant_argument(wanted.default_value().value_or(c10::IValue())));
      } else {
        throw ConfigError(
            fmt::format("the file has no argument '{}', which this LibTorch's operator needs", wanted.name()));
      }
    }
    if (used != inputs.size()) {
      throw ConfigError(
          "the file has arguments that this LibTorch's operator does not take; is it of another version of torch?");
    }
  }

  void read_function(GraphNode& node, const std::string& target, const ExportJson& inputs) {
    node.kind = GraphNode::Kind::Function;
    node.function = find_python_function(target);
    if (node.function == nullptr) {
      const bool is_vmap = target.find("_functorch") != std::string::npos;
      throw ConfigError(fmt::format("'{}' is a Python function, which C++ cannot call; write {} as tensor operations",
                                    target, is_vmap ? "the loop that torch.vmap stands for" : "it"));
    }
    for (const ExportJson& input : inputs) {
      node.arguments.push_back(values_.argument_of(input.at("arg")));
    }
    if (node.arguments.size() != node.function->arguments) {
      throw CorruptFile(fmt::format("{} arguments instead of {}", node.arguments.size(), node.function->arguments));
    }
  }

  void read_region(GraphNode& node, const std::string& name, const ExportJson& inputs) {
    static const std::map<std::string, GraphNode::Kind> known{{"wrap_with_set_grad_enabled", GraphNode::Kind::GradMode},
                                                              {"wrap_with_autocast", GraphNode::Kind::Autocast},
                                                              {"cond", GraphNode::Kind::Cond},
                                                              {"invoke_subgraph", GraphNode::Kind::Inline}};
    const auto found = known.find(name);
    if (found == known.end()) {
      throw ConfigError(fmt::format("the higher-order operator '{}' is not supported", name));
    }
    node.kind = found->second;
    for (const ExportJson& input : inputs) {
      const auto& [kind, value] = union_of(input.at("arg"));
      const bool is_graphs_name = kind == "as_string" && !node.graphs.empty();
      if (kind == "as_graph") {
        node.graphs.push_back(read_graph(value.at("graph")));
      } else if (kind == "as_tensors") {  // cond's operands
        for (const ExportJson& operand : value) {
          node.arguments.push_back(values_.value_named(operand.at("name")));
        }
      } else if (!is_graphs_name) {
        node.arguments.push_back(values_.argument_of(input.at("arg")));
      }
    }
    const size_t inner = node.arguments.size() - std::min(node.settings(), node.arguments.size());
    const bool fits = std::all_of(node.graphs.begin(), node.graphs.end(),
                                  [&](const auto& one) { return one->inputs.size() == inner; });
    if (node.graphs.size() != (node.kind == GraphNode::Kind::Cond ? 2 : 1) || node.arguments.size() < node.settings() ||
        !fits) {
      throw CorruptFile(
          fmt::format("{} arguments and {} graphs do not fit together", node.arguments.size(), node.graphs.size()));
    }
  }

  void read_results(GraphNode& node, const ExportJson& outputs) {
    node.result_is_list = outputs.size() == 1 && union_of(outputs.at(0)).kind == "as_tensors";
    for (const ExportJson& output : node.result_is_list ? union_of(outputs.at(0)).value : outputs) {
      node.results.push_back(
          values_.new_slot(node.result_is_list ? output.at("name").get<std::string>() : name_of_value(output)));
    }
  }

  std::unique_ptr<OperatorGraph> graph_ = std::make_unique<OperatorGraph>();
  ArgumentReader values_;
};

}  // namespace

std::unique_ptr<OperatorGraph> read_graph(const ExportJson& json) { return GraphReader().read(json); }

}  // namespace snug::detail
