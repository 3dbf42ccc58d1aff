#pragma once
// The tensors of an exported file: parameters, buffers and constants, registered in a module under their Python names.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "src/exported/union_json.h"
#include "src/exported/zip_archive.h"

namespace snug::detail {

struct TensorAtExport {
  std::string name;  // the name in the file
  std::string key;   // the name in the module; constants: with the program's name, as each program numbers its own
  bool is_parameter = false;
  bool is_persistent = true;
  const ExportJson& meta;  // dtype and sizes in the graph
};

/// The tensors of a module by their keys.
struct ExportedTensors {
  std::map<std::string, at::Tensor> all;
  std::map<std::string, std::string>
      aliases;                      // further names of a tensor -> the first name, under which the tensor is registered
  std::set<std::string> transient;  // constants, and buffers that are not persistent
};

/// Reads each tensor of `wanted` that `tensors` lacks, in the order of `wanted` (Python's order), and registers the
/// tensors in `root` and modules below `root`. Returns the tensors' device at export. Throws CorruptFile if file and
/// graph do not agree, ConfigError for pickled weights.
c10::Device read_weights(const ZipArchive& archive, const std::string& program,
                         const std::vector<TensorAtExport>& wanted, torch::nn::Module& root, ExportedTensors& tensors);

/// The module of a tensor's name ("layers.0.weight") below `root`; missing modules are made. Throws CorruptFile for a
/// name of more than 100 parts.
torch::nn::Module& module_at(torch::nn::Module& root, const std::string& path);

/// Casts floating-point tensors in place, and moves all tensors to `device`, if given.
void cast_floats(const std::map<std::string, at::Tensor>& tensors, std::optional<at::Device> device,
                 at::ScalarType dtype, bool non_blocking);

/// Parses the text of a JSON record. Throws CorruptFile for other text.
ExportJson read_json(const ZipArchive& archive, const std::string& record);

}  // namespace snug::detail
