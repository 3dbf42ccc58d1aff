// How a graph runs with Python's bits
//
// Problem: an exported program must train in C++ as in Python: the same losses, gradients and weights to the bit, under
// autocast, plans and budgets.
//
// Options: generate C++ code from the graph, or call operator by operator through LibTorch's dispatcher.
//
// Choice: the dispatcher. Autograd, autocast and policies hook into the dispatcher, so they see the same calls as for a
// model in C++. Values lie in numbered slots. A node's arguments go on a stack, the operator replaces the arguments by
// results, and the results go back into slots.
//
// Consequences:
// - Memory falls as in C++: the last use moves a value out of its slot.
// - The arguments stay alive during a call, as in a C++ caller.
// - Regions set gradient mode or autocast around a graph of their own, as Python's context managers do.
// - Devices in the graph follow the model: the device of export means the device of now.
// - A branch that does not run gives its operands gradients of zeros, as torch.cond does.

#include "src/exported/interpreter.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>

#include "snug/core.h"
#include "src/exported/schema_value.h"

namespace snug::detail {
namespace {

// Sets autocast as a region in the graph says, and enters and leaves the region as Python's context manager does.
class [[nodiscard]] AutocastRegion final {
 public:
  AutocastRegion(c10::DeviceType device, c10::ScalarType dtype, bool enabled, bool cache)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        had_cache_(at::autocast::is_autocast_cache_enabled()),
        dtype_before_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;
  ~AutocastRegion() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_before_);
    at::autocast::set_autocast_cache_enabled(had_cache_);
  }

 private:
  c10::DeviceType device_;
  bool was_enabled_, had_cache_;
  c10::ScalarType dtype_before_;
};

using Values = std::vector<c10::IValue>;

Values elements_of(const c10::IValue& list) {
  const auto tensors = list.toTensorVector();
  return {tensors.begin(), tensors.end()};
}

c10::IValue call_function(const GraphNode& node, const Values& arguments) {
  std::vector<PythonNumber> numbers;
  std::transform(arguments.begin(), arguments.end(), std::back_inserter(numbers), number_of);
  try {
    return value_of(node.function->call(numbers));
  } catch (const Error& error) {
    throw Error(error.what() + node.where);
  }
}

void store(Values& results, const std::vector<int>& slots, Values& values) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= 0) {
      values[static_cast<size_t>(slots[i])] = std::move(results[i]);
    }
  }
  results.clear();
}

// Returns `result`, equal to the bit, as a constant function of `operand`.
at::Tensor with_zero_gradient_for(const at::Tensor& operand, const at::Tensor& result) {
  at::Tensor first = operand;
  while (first.dim() > 0) {
    first = first.select(0, 0);
  }
  return at::where(at::ones({}, result.options().dtype(at::kBool).requires_grad(false)), result, first);
}

}  // namespace

Values Interpreter::run(const OperatorGraph& graph, Values inputs) const {
  TORCH_CHECK(inputs.size() == graph.inputs.size(), inputs.size(), " inputs for a graph of ", graph.inputs.size());
  Values values(static_cast<size_t>(graph.slots)), stack;
  store(inputs, graph.inputs, values);
  for (const GraphNode& node : graph.nodes) {
    for (const GraphArgument& argument : node.arguments) {
      stack.push_back(make(argument, values));
    }
    try {
      run_node(node, stack);
      TORCH_CHECK(stack.size() >= node.results.size(), stack.size(), " results instead of ", node.results.size());
    } catch (c10::OutOfMemoryError&) {
      throw;
    } catch (c10::Error& error) {
      error.add_context(node.where);
      throw;
    }
    store(stack, node.results, values);
  }
  Values outputs;
  for (const GraphArgument& output : graph.outputs) {
    outputs.push_back(make(output, values));
  }
  return outputs;
}

c10::IValue Interpreter::make(const GraphArgument& argument, Values& values) const {
  switch (argument.kind) {
    case GraphArgument::Kind::Constant:
      return argument.constant;
    case GraphArgument::Kind::Device:
      return argument.constant.toDevice().type() == home.type() ? c10::IValue(here) : argument.constant;
    case GraphArgument::Kind::Value: {
      c10::IValue& value = values[static_cast<size_t>(argument.slot)];
      return as_type(argument.is_last_use ? std::exchange(value, c10::IValue()) : value, argument.type);
    }
    case GraphArgument::Kind::List:
      break;
  }
  c10::impl::GenericList list(argument.type);
  for (const GraphArgument& item : argument.items) {
    list.push_back(make(item, values));
  }
  return list;
}

void Interpreter::run_node(const GraphNode& node, Values& stack) const {
  if (node.kind == GraphNode::Kind::Function) {
    stack = {call_function(node, stack)};
  } else if (node.kind != GraphNode::Kind::Operator) {
    run_region(node, stack);
  } else {
    // A caller in C++ keeps the arguments alive during the call, and policies that watch operators may look at the
    // arguments after the call.
    const Values held = stack;
    node.op->callBoxed(&stack);
  }
  if (node.result_is_list) {
    TORCH_CHECK(!stack.empty(), "no result instead of a list");
    stack = elements_of(c10::IValue(stack.back()));
  }
}

void Interpreter::run_region(const GraphNode& node, Values& stack) const {
  const auto inner = stack.begin() + static_cast<std::ptrdiff_t>(node.settings());
  const Values settings(std::make_move_iterator(stack.begin()), std::make_move_iterator(inner));
  stack.erase(stack.begin(), inner);
  const auto run_graph = [&](size_t index) { stack = run(*node.graphs.at(index), std::exchange(stack, {})); };
  const auto is_on = [&](size_t index) { return as_bool(number_of(settings.at(index))); };
  if (node.kind == GraphNode::Kind::GradMode) {
    const c10::AutoGradMode mode(is_on(0));
    run_graph(0);
  } else if (node.kind == GraphNode::Kind::Autocast) {
    const auto at_export = c10::Device(settings[0].toStringRef()).type();
    const auto device = at_export == home.type() ? here.type() : at_export;
    const auto dtype = settings[1].isNone() ? at::autocast::get_autocast_dtype(device) : settings[1].toScalarType();
    const AutocastRegion region(device, dtype, is_on(2), autocast_cache || settings[3].isNone() || is_on(3));
    run_graph(0);
  } else if (node.kind == GraphNode::Kind::Cond) {
    run_branch(*node.graphs.at(is_on(0) ? 0 : 1), stack);
  } else {
    run_graph(0);
  }
}

// The operands of the other branch get gradients of zeros, as with torch.cond: optimizers go on with their moments.
void Interpreter::run_branch(const OperatorGraph& graph, Values& stack) const {
  std::vector<at::Tensor> of_other_branch;
  for (size_t i = 0; i < graph.inputs.size() && at::GradMode::is_enabled(); ++i) {
    if (graph.inputs[i] < 0 && stack[i].isTensor() && stack[i].toTensor().requires_grad()) {
      of_other_branch.push_back(stack[i].toTensor());
    }
  }
  stack = run(graph, std::exchange(stack, {}));
  for (const at::Tensor& operand : of_other_branch) {
    const auto result = std::find_if(stack.begin(), stack.end(), [](const c10::IValue& value) {
      return value.isTensor() && value.toTensor().is_floating_point();
    });
    if (result != stack.end() && operand.numel() > 0) {
      *result = with_zero_gradient_for(operand, result->toTensor());
    }
  }
}

}  // namespace snug::detail
