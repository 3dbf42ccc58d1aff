#pragma once
// From the file's JSON to a graph: names become slots, operators are looked up, and their arguments are made fit for
// their schemas, so that running needs no look at either.

#include <memory>
#include <string>

#include "snug/exported/detail/graph.h"
#include "snug/exported/detail/union_json.h"

namespace snug::detail {

/// Reads {"inputs", "nodes", "outputs"} and the graphs in it. Throws ConfigError, with the operator, its layer and its
/// Python line, for what this program cannot run, and CorruptFile for what torch.export does not write.
std::unique_ptr<OperatorGraph> read_graph(const ExportJson& json);

/// The name of a value: {"as_tensor": {"name": "x"}}, {"as_sym_int": {"as_name": "s"}}; empty for values without one.
std::string name_of_value(const ExportJson& argument);

}  // namespace snug::detail
