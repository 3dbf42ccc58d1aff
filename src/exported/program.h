#pragma once
// A program of an exported file: a graph, the graph's tensors, and its inputs and outputs.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/exported/graph.h"
#include "src/exported/input_check.h"
#include "src/exported/weights.h"

namespace snug::detail {

struct ExportedProgram {
  struct Input {
    enum class Kind { Given, Parameter, Buffer, Constant } kind = Kind::Given;
    at::Tensor tensor;  // the tensor of a parameter or buffer
  };

  std::unique_ptr<OperatorGraph> graph;
  std::vector<Input> inputs;         // the graph's inputs
  std::vector<InputAtExport> given;  // the caller's inputs, in order
  std::map<std::string, SizeRange> ranges;
  std::vector<std::string> output_names;
  c10::Device home = c10::kCPU;  // the tensors' device at export

  /// Returns all outputs, flat.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs, bool autocast_cache) const;
};

/// Reads models/NAME.json, and registers in `root` all tensors that `tensors` does not have yet. Throws as
/// load_exported does, without the file's name.
std::unique_ptr<ExportedProgram> read_program(const ZipArchive& archive, const std::string& name,
                                              torch::nn::Module& root, ExportedTensors& tensors);

}  // namespace snug::detail
