#pragma once
// The inputs that a program was exported for, and a check of those it is given.

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
  int64_t fixed = -1;  // or
  std::string
      symbol;  // the name of a size that may change; or neither: a size computed of others, which is not checked
};

struct InputAtExport {
  std::string name;
  std::optional<c10::ScalarType> dtype;  // none: it is a number
  std::vector<SizeAtExport> sizes;
};

struct SizeRange {
  int64_t least = 0, most = std::numeric_limits<int64_t>::max();
};

/// `tensors`: the graph's "tensor_values".
InputAtExport read_input(const ExportJson& argument, const ExportJson& tensors);
std::map<std::string, SizeRange> read_ranges(const ExportJson& constraints);

/// Throws UnfitInput.
void check_inputs(const std::vector<InputAtExport>& expected, const std::map<std::string, SizeRange>& ranges,
                  const std::vector<c10::IValue>& given);

}  // namespace snug::detail
