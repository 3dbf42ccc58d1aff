#include "snug/exported/detail/graph_reader.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <ATen/core/jit_type.h>
#include <fmt/format.h>

#include "snug/exported/detail/file_types.h"
#include "snug/exported/detail/node_place.h"
#include "snug/exported/detail/schema_value.h"

namespace snug::detail {
namespace {

using Kind = GraphArgument::Kind;

GraphArgument constant(c10::IValue value) {
  GraphArgument argument;
  argument.constant = std::move(value);
  return argument;
}

GraphArgument list_of(std::vector<GraphArgument> items, const c10::TypePtr& element) {
  GraphArgument list;
  list.type = element ? element : c10::AnyType::get();
  if (std::any_of(items.begin(), items.end(), [](const auto& item) { return item.kind != Kind::Constant; })) {
    list.kind = Kind::List;
    list.items = std::move(items);
    return list;
  }
  c10::impl::GenericList constants(list.type);
  for (const GraphArgument& item : items) {
    constants.push_back(item.constant);
  }
  list.constant = constants;
  return list;
}

// Operators that reach beyond tensors. A model has no use for them; a file of unknown origin may.
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

// Reads one graph; those in it by readers of their own.
class GraphReader {
 public:
  std::unique_ptr<OperatorGraph> read(const ExportJson& json) {
    for (const ExportJson& input : json.at("inputs")) {
      graph_->inputs.push_back(slot_of(name_of_value(input)));
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
      graph_->outputs.push_back(argument_of(output, nullptr));
    }
    mark_last_uses(*graph_);
    return std::move(graph_);
  }

 private:
  void read_node(const ExportJson& json, const std::string& where) {
    const std::string target = json.at("target");
    const ExportJson& inputs = json.at("inputs");
    constexpr std::string_view kOperators = "torch.ops.", kRegions = "torch.ops.higher_order.";
    if (target == "torch.ops.aten._assert_tensor_metadata.default") {
      return;  // dtypes may differ from those at export, under autocast; aten::to, which it guards, looks for itself
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
        node.arguments.push_back(argument_of(found->at("arg"), wanted.type()));
      } else if (wanted.default_value() || wanted.type()->kind() == c10::TypeKind::OptionalType) {
        node.arguments.push_back(constant(wanted.default_value().value_or(c10::IValue())));
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
      node.arguments.push_back(argument_of(input.at("arg"), nullptr));
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
          node.arguments.push_back(value_named(operand.at("name"), nullptr));
        }
      } else if (!is_graphs_name) {
        node.arguments.push_back(argument_of(input.at("arg"), nullptr));
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
          slot_of(node.result_is_list ? output.at("name").get<std::string>() : name_of_value(output)));
    }
  }

  // `type`: the schema's, null where there is no schema.
  GraphArgument argument_of(const ExportJson& json, const c10::TypePtr& type) {
    GraphArgument one = read_argument(json, type);
    const auto element = element_type(type);
    const bool is_number = one.kind == Kind::Value ? union_of(json).kind != "as_tensor" : one.constant.isScalar();
    if (!element || !is_number) {
      return one;
    }
    std::vector<GraphArgument> items;  // 3 for int[2]
    items.push_back(std::move(one));
    return list_of(std::move(items), element);
  }

  GraphArgument read_argument(const ExportJson& json, const c10::TypePtr& type) {
    if (!json.is_object()) {
      return read_plain(json, type);
    }
    const auto& [kind, value] = union_of(json);
    if (kind == "as_none") {
      return {};
    }
    if (kind == "as_name" || kind == "name") {
      return value_named(value, kind == "name" ? nullptr : type);
    }
    if (kind == "as_string") {
      return constant(value.get<std::string>());
    }
    if (kind == "as_scalar_type") {
      return constant(scalar_type_of(value));
    }
    if (kind == "as_memory_format") {
      return constant(memory_format_of(value));
    }
    if (kind == "as_layout" && value == 7) {
      return constant(c10::kStrided);
    }
    if (kind == "as_complex") {
      return constant(as_type(c10::complex<double>(float_of(value.at("real")), float_of(value.at("imag"))), type));
    }
    if (kind == "as_device") {
      GraphArgument device = constant(device_of(value));
      device.kind = Kind::Device;
      return device;
    }
    constexpr std::array kWrappers{"as_tensor",
                                   "as_tensors",
                                   "as_int",
                                   "as_ints",
                                   "as_float",
                                   "as_floats",
                                   "as_bool",
                                   "as_bools",
                                   "as_sym_int",
                                   "as_sym_ints",
                                   "as_sym_bool",
                                   "as_sym_bools",
                                   "as_strings",
                                   "as_sym_float",
                                   "as_sym_floats",
                                   "as_optional_tensor",
                                   "as_optional_tensors",
                                   "as_nested_tensors",
                                   "as_int_lists",
                                   "as_float_lists"};
    if (std::find(kWrappers.begin(), kWrappers.end(), kind) == kWrappers.end()) {
      throw ConfigError(
          fmt::format("an argument of the kind {} is not supported", kind == "as_layout" ? "sparse layout" : kind));
    }
    return read_argument(value, type);
  }

  GraphArgument read_plain(const ExportJson& json, const c10::TypePtr& type) {
    if (json.is_array()) {
      std::vector<GraphArgument> items;
      for (const ExportJson& item : json) {
        items.push_back(read_argument(item, element_type(type)));
      }
      return list_of(std::move(items), element_type(type));
    }
    if (json.is_boolean()) {
      return constant(as_type(json.get<bool>(), type));
    }
    if (json.is_number_integer()) {
      return constant(as_type(json.get<int64_t>(), type));
    }
    const auto element = type && type->kind() == c10::TypeKind::OptionalType
                             ? type->castRaw<c10::OptionalType>()->getElementType()
                             : type;
    if (json.is_string() && element && element->kind() == c10::TypeKind::StringType) {
      return constant(json.get<std::string>());
    }
    return constant(as_type(float_of(json), type));
  }

  GraphArgument value_named(const std::string& name, const c10::TypePtr& type) {
    const auto found = slots_.find(name);
    if (found == slots_.end()) {
      throw CorruptFile(fmt::format("the value '{}' is used before it is made", name));
    }
    GraphArgument value;
    value.kind = Kind::Value;
    value.slot = found->second;
    value.type = type;
    return value;
  }

  int slot_of(const std::string& name) {
    if (name.empty()) {
      return -1;
    }
    const auto [found, is_new] = slots_.try_emplace(name, graph_->slots);
    if (!is_new) {
      throw CorruptFile(fmt::format("the value '{}' is made twice", name));
    }
    ++graph_->slots;
    return found->second;
  }

  std::unique_ptr<OperatorGraph> graph_ = std::make_unique<OperatorGraph>();
  std::unordered_map<std::string, int> slots_;
};

}  // namespace

std::unique_ptr<OperatorGraph> read_graph(const ExportJson& json) { return GraphReader().read(json); }

std::string name_of_value(const ExportJson& argument) {
  const ExportJson& value = union_of(argument).value;
  for (const char* field : {"name", "as_name"}) {
    if (value.is_object() && value.contains(field)) {
      return value.at(field);
    }
  }
  return {};
}

}  // namespace snug::detail
