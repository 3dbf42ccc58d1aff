#pragma once
// From the file's JSON to a graph. Operators are looked up, names become slots, and arguments are made fit for schemas
// (argument_reader.h), so that a run looks at neither JSON nor schemas. graph_reader.cpp says why.

#include <memory>

#include "src/exported/graph.h"
#include "src/exported/union_json.h"

namespace snug::detail {

/// Reads {"inputs", "nodes", "outputs"} and the inner graphs. Throws ConfigError, with the operator, its layer and its
/// Python line, for programs that this program cannot run, and CorruptFile for content that torch.export does not
/// write.
std::unique_ptr<OperatorGraph> read_graph(const ExportJson& json);

}  // namespace snug::detail
