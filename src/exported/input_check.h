#pragma once
// The inputs that a program was exported for, and a check of the inputs of a call.

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include "src/exported/union_json.h"

namespace snug::detail {

struct SizeAtExport {
  int64_t fixed = -1;  // -1: see `symbol`
  std::string symbol;  // the name of a size that may change; neither: a size computed from other sizes, not checked
};

struct InputAtExport {
  std::string name;
  std::optional<c10::ScalarType> dtype;  // none: the input is a number
  std::vector<SizeAtExport> sizes;
};

struct SizeRange {
  int64_t least = 0, most = std::numeric_limits<int64_t>::max();
};

/// Reads the description of an input. `tensors` is the graph's "tensor_values".
InputAtExport read_input(const ExportJson& argument, const ExportJson& tensors);
std::map<std::string, SizeRange> read_ranges(const ExportJson& constraints);

/// Throws UnfitInput for an input that the program was not exported for.
void check_inputs(const std::vector<InputAtExport>& expected, const std::map<std::string, SizeRange>& ranges,
                  const std::vector<c10::IValue>& given);

}  // namespace snug::detail
