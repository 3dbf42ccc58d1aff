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
  std::string name;  // in the file
  std::string key;   // in the module: the same, but for constants, whose names mean others in another program
  bool is_parameter = false;
  bool is_persistent = true;
  const ExportJson& meta;  // the graph's: dtype and sizes
};

/// The tensors of a module by their keys.
struct ExportedTensors {
  std::map<std::string, at::Tensor> all;
  std::map<std::string, std::string>
      aliases;                      // further names of a tensor, and the first one, under which it is registered
  std::set<std::string> transient;  // constants, and buffers that are not persistent
};

/// Reads those of `wanted` that `tensors` lacks, in this order, which is Python's, and registers them in `root` and
/// modules below it. Returns the device that they were on at export. Throws CorruptFile where file and graph do not
/// agree, ConfigError for weights that are pickled.
c10::Device read_weights(const ZipArchive& archive, const std::string& program,
                         const std::vector<TensorAtExport>& wanted, torch::nn::Module& root, ExportedTensors& tensors);

/// The module with the path of a tensor's name ("layers.0.weight") below `root`, made where it is missing. Throws
/// CorruptFile for one of more than 100 parts.
torch::nn::Module& module_at(torch::nn::Module& root, const std::string& path);

/// Casts floating-point tensors in place, and moves all to `device`, if it is given.
void cast_floats(const std::map<std::string, at::Tensor>& tensors, std::optional<at::Device> device,
                 at::ScalarType dtype, bool non_blocking);

/// The text of a JSON record, parsed. Throws CorruptFile if it is none.
ExportJson read_json(const ZipArchive& archive, const std::string& record);

}  // namespace snug::detail
