#pragma once
// The place of a node in the Python program, for messages.

#include <string>

#include "snug/exported/detail/union_json.h"

namespace snug::detail {

/// " [in torch.ops.aten.linear.default, layer net.fc1, from File "model.py", line 12, in forward]": layer and line
/// where the file has them.
std::string place_of_node(const ExportJson& node);

}  // namespace snug::detail
