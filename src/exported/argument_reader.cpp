#include "src/exported/argument_reader.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <fmt/format.h>

#include "src/exported/file_types.h"
#include "src/exported/schema_value.h"

namespace snug::detail {
namespace {

using Kind = GraphArgument::Kind;

// Whether the kind wraps a plain value or name, or a list of plain values or names.
constexpr std::array<std::string_view, 20> kWrappers{
    "as_tensor", "as_tensors", "as_optional_tensor", "as_optional_tensors", "as_nested_tensors",
    "as_int",    "as_ints",    "as_int_lists",       "as_sym_int",          "as_sym_ints",
    "as_float",  "as_floats",  "as_float_lists",     "as_sym_float",        "as_sym_floats",
    "as_bool",   "as_bools",   "as_sym_bool",        "as_sym_bools",        "as_strings"};

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

bool is_text(const c10::TypePtr& type) {
  const auto element =
      type && type->kind() == c10::TypeKind::OptionalType ? type->castRaw<c10::OptionalType>()->getElementType() : type;
  return element && element->kind() == c10::TypeKind::StringType;
}

}  // namespace

int ArgumentReader::new_slot(const std::string& name) {
  if (name.empty()) {
    return -1;
  }
  const auto [found, is_new] = slot_of_.try_emplace(name, slots_);
  if (!is_new) {
    throw CorruptFile(fmt::format("the value '{}' is made twice", name));
  }
  ++slots_;
  return found->second;
}

GraphArgument ArgumentReader::value_named(const std::string& name, const c10::TypePtr& type) const {
  const auto found = slot_of_.find(name);
  if (found == slot_of_.end()) {
    throw CorruptFile(fmt::format("the value '{}' is used before it is made", name));
  }
  GraphArgument value;
  value.kind = Kind::Value;
  value.slot = found->second;
  value.type = type;
  return value;
}

GraphArgument ArgumentReader::argument_of(const ExportJson& json, const c10::TypePtr& type) const {
  GraphArgument one = read(json, type);
  const auto element = element_type(type);
  const bool is_number = one.kind == Kind::Value ? union_of(json).kind != "as_tensor" : one.constant.isScalar();
  if (!element || !is_number) {
    return one;
  }
  std::vector<GraphArgument> items;  // a single number for a list, such as 3 for int[2]
  items.push_back(std::move(one));
  return list_of(std::move(items), element);
}

GraphArgument ArgumentReader::read(const ExportJson& json, const c10::TypePtr& type) const {
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
    return constant_argument(value.get<std::string>());
  }
  if (kind == "as_scalar_type") {
    return constant_argument(scalar_type_of(value));
  }
  if (kind == "as_memory_format") {
    return constant_argument(memory_format_of(value));
  }
  if (kind == "as_layout" && value == 7) {
    return constant_argument(c10::kStrided);
  }
  if (kind == "as_complex") {
    const c10::complex<double> number(float_of(value.at("real")), float_of(value.at("imag")));
    return constant_argument(as_type(number, type));
  }
  if (kind == "as_device") {
    GraphArgument device = constant_argument(device_of(value));
    device.kind = Kind::Device;
    return device;
  }
  if (std::find(kWrappers.begin(), kWrappers.end(), kind) == kWrappers.end()) {
    throw ConfigError(
        fmt::format("an argument of the kind {} is not supported", kind == "as_layout" ? "sparse layout" : kind));
  }
  return read(value, type);
}

GraphArgument ArgumentReader::read_plain(const ExportJson& json, const c10::TypePtr& type) const {
  if (json.is_array()) {
    std::vector<GraphArgument> items;
    for (const ExportJson& item : json) {
      items.push_back(read(item, element_type(type)));
    }
    return list_of(std::move(items), element_type(type));
  }
  if (json.is_boolean()) {
    return constant_argument(as_type(json.get<bool>(), type));
  }
  if (json.is_number_integer()) {
    return constant_argument(as_type(json.get<int64_t>(), type));
  }
  if (json.is_string() && is_text(type)) {
    return constant_argument(json.get<std::string>());
  }
  return constant_argument(as_type(float_of(json), type));
}

GraphArgument constant_argument(c10::IValue value) {
  GraphArgument argument;
  argument.constant = std::move(value);
  return argument;
}

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
