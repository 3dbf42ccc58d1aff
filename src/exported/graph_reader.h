#pragma once
// From the file's JSON to a graph: operators are looked up, names become slots, and arguments are made fit for schemas
// (argument_reader.h), so that running needs no look at either.

#include <memory>

#include "src/exported/graph.h"
#include "src/exported/union_json.h"

namespace snug::detail {

/// Reads {"inputs", "nodes", "outputs"} and the graphs in it. Throws ConfigError, with the operator, its layer and its
/// Python line, for what this program cannot run, and CorruptFile for what torch.export does not write.
std::unique_ptr<OperatorGraph> read_graph(const ExportJson& json);

}  // namespace snug::detail
