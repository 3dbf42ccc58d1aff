// Calls operators by name under snug::Autocast and prints the types of what they return, so that a script can compare.
//
// usage: autocast_tool CALLS bfloat16|float16 [fp32_reductions]
//        autocast_tool --fp32-reductions: the operators that this option adds to those that LibTorch has a kernel of
//                                         CPU autocast for
//
// CALLS is a file of torch.save: a tuple of (name, overload, (argument, ...)), all arguments of the schema in order.
// One line of answer per call: the types of the outputs, or "error MESSAGE".

#include <fstream>
#include <iostream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/torch.h>

#include "snug/autocast.h"

namespace {

// Lists lose the type of their elements on the way, as Python's have none.
template <class T>
c10::IValue list_of(const std::vector<c10::IValue>& elements) {
  c10::List<T> list;
  for (const c10::IValue& element : elements) {
    list.push_back(element.to<T>());
  }
  return list;
}

c10::IValue as(const c10::Type& type, const c10::IValue& value) {
  if (const auto* optional = type.castRaw<c10::OptionalType>()) {
    return value.isNone() ? value : as(*optional->getElementType(), value);
  }
  if (type.kind() == c10::TypeKind::FloatType && value.isInt()) {
    return static_cast<double>(value.toInt());
  }
  const auto* list = type.castRaw<c10::ListType>();
  if (list == nullptr) {
    return value;
  }
  const std::vector<c10::IValue> elements =
      value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
  switch (list->getElementType()->kind()) {
    case c10::TypeKind::TensorType:
      return list_of<at::Tensor>(elements);
    case c10::TypeKind::OptionalType:
      return list_of<std::optional<at::Tensor>>(elements);
    case c10::TypeKind::FloatType:
      return list_of<double>(elements);
    case c10::TypeKind::BoolType:
      return list_of<bool>(elements);
    default:
      return list_of<int64_t>(elements);
  }
}

std::string answer(const std::vector<c10::IValue>& call) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(call[0].toStringRef().c_str(), call[1].toStringRef().c_str());
  const auto given = call[2].toTupleRef().elements();
  torch::jit::Stack stack;
  for (size_t i = 0; i < given.size(); ++i) {
    stack.push_back(as(*op.schema().arguments()[i].type(), given[i]));
  }
  op.callBoxed(&stack);
  std::string types;
  for (const c10::IValue& output : stack) {
    types += output.isTensor() ? std::string(" ") + c10::toString(output.toTensor().scalar_type()) : " other";
  }
  return types.substr(1);
}

std::set<std::string> registered() {
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::AutocastCPU)) {
    names.insert(toString(name));
  }
  return names;
}

void print_fp32_reductions() {
  const auto before = registered();
  const snug::Autocast autocast(torch::kCPU, torch::kBFloat16, {.fp32_reductions = true});
  for (const std::string& name : registered()) {
    if (!before.contains(name)) {
      std::cout << name << "\n";
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--fp32-reductions") {
    print_fp32_reductions();
    return 0;
  }
  if (argc < 3) {
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const c10::IValue calls = torch::pickle_load(bytes);
  const bool fp32_reductions = argc > 3 && std::string(argv[3]) == "fp32_reductions";
  const snug::Autocast autocast(torch::kCPU, std::string(argv[2]) == "float16" ? torch::kHalf : torch::kBFloat16,
                                {.fp32_reductions = fp32_reductions});
  for (const c10::IValue& call : calls.toTupleRef().elements()) {
    try {
      const std::string types = answer(call.toTupleRef().elements().vec());
      std::cout << types << "\n";
    } catch (const std::exception& error) {  // oneDNN has its own
      const std::string message = error.what();
      std::cout << "error " << message.substr(0, message.find('\n')) << "\n";
    }
  }
}
