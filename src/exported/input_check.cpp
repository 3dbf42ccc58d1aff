#include "src/exported/input_check.h"

#include <fmt/format.h>

#include "snug/exported/exported_module.h"
#include "src/core/parse_json.h"
#include "src/exported/argument_reader.h"
#include "src/exported/file_types.h"

namespace snug::detail {
namespace {

template <class... T>
[[noreturn]] void refuse(const InputAtExport& input, fmt::format_string<T...> what, T&&... values) {
  throw UnfitInput(
      fmt::format("ExportedModule: input '{}' {}", input.name, fmt::format(what, std::forward<T>(values)...)));
}

SizeAtExport read_size(const ExportJson& json) {
  const auto& [kind, value] = union_of(json);
  if (kind == "as_int") {
    return {.fixed = whole_number<int64_t>(value), .symbol = {}};
  }
  const std::string text = value.at("expr_str"), begin = "Symbol('";  // Symbol('s0', positive=True, integer=True)
  return {
      .fixed = -1,
      .symbol = text.starts_with(begin) ? text.substr(begin.size(), text.find('\'', begin.size()) - begin.size()) : ""};
}

void check_size(const InputAtExport& input, size_t dimension, int64_t size,
                const std::map<std::string, SizeRange>& ranges, std::map<std::string, int64_t>& symbols) {
  const auto& [fixed, symbol] = input.sizes[dimension];
  if (fixed >= 0 && size != fixed) {
    refuse(input,
           "has {} in dimension {}, where the program was exported for {} alone; export with "
           "dynamic_shapes={{\"{}\": {{{}: torch.export.Dim.DYNAMIC}}}}",
           size, dimension, fixed, input.name, dimension);
  }
  if (symbol.empty()) {
    return;
  }
  const auto [known, is_new] = symbols.try_emplace(symbol, size);
  if (!is_new && known->second != size) {
    refuse(input, "has {} in dimension {}, but another dimension that must be equal has {}", size, dimension,
           known->second);
  }
  const auto range = ranges.find(symbol);
  if (range != ranges.end() && (size < range->second.least || size > range->second.most)) {
    const bool is_open = range->second.most == SizeRange{}.most;
    refuse(input, "has {} in dimension {}, where the program was exported for {} {}", size, dimension,
           range->second.least, is_open ? "or more" : fmt::format("to {}", range->second.most));
  }
}

}  // namespace

InputAtExport read_input(const ExportJson& argument, const ExportJson& tensors) {
  InputAtExport input{.name = name_of_value(argument), .dtype = {}, .sizes = {}};
  if (union_of(argument).kind == "as_tensor") {
    const ExportJson& meta = tensors.at(input.name);
    input.dtype = scalar_type_of(meta.at("dtype"));
    for (const ExportJson& size : meta.at("sizes")) {
      input.sizes.push_back(read_size(size));
    }
  }
  return input;
}

std::map<std::string, SizeRange> read_ranges(const ExportJson& constraints) {
  std::map<std::string, SizeRange> ranges;
  for (const auto& [symbol, range] : constraints.items()) {
    const ExportJson &least = range.at("min_val"), &most = range.at("max_val");
    SizeRange read{.least = least.is_null() ? 0 : whole_number<int64_t>(least),
                   .most = most.is_null() ? SizeRange{}.most : whole_number<int64_t>(most)};
    // torch.export writes 2 for any size, because export cannot see whether 1 is special. Python's check also lets 1
    // pass.
    ranges[symbol] = {.least = read.least <= 2 ? 0 : read.least, .most = read.most};
  }
  return ranges;
}

void check_inputs(const std::vector<InputAtExport>& expected, const std::map<std::string, SizeRange>& ranges,
                  const std::vector<c10::IValue>& given) {
  if (given.size() != expected.size()) {
    throw UnfitInput(fmt::format("ExportedModule: {} inputs instead of {}", given.size(), expected.size()));
  }
  std::map<std::string, int64_t> symbols;
  for (size_t i = 0; i < expected.size(); ++i) {
    const InputAtExport& input = expected[i];
    if (given[i].isTensor() != input.dtype.has_value()) {
      refuse(input, "is {}", input.dtype ? "no tensor" : "a tensor, where the program takes a number");
    }
    if (!input.dtype) {
      continue;
    }
    const at::Tensor& tensor = given[i].toTensor();
    if (!tensor.defined()) {
      refuse(input, "is an undefined tensor");
    }
    const bool both_float = tensor.is_floating_point() && c10::isFloatingType(*input.dtype);
    if (tensor.scalar_type() != *input.dtype && !both_float) {
      refuse(input, "is {}, but was {} at export", c10::toString(tensor.scalar_type()), c10::toString(*input.dtype));
    }
    if (tensor.dim() != std::ssize(input.sizes)) {
      refuse(input, "has {} dimensions, but had {} at export", tensor.dim(), input.sizes.size());
    }
    for (size_t dimension = 0; dimension < input.sizes.size(); ++dimension) {
      check_size(input, dimension, tensor.size(static_cast<int64_t>(dimension)), ranges, symbols);
    }
  }
}

}  // namespace snug::detail
