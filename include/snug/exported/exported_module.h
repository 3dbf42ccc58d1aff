#pragma once
// A model that Python saved by torch.export.save, as a torch::nn::Module that trains in C++. The file holds a graph of
// operators and the weights. Operators run one by one through LibTorch's dispatcher, so autograd, autocast, plans and
// budgets see the same operators as for a C++ model, and losses, gradients and weights have Python's bits.
// python/snug_export.py saves such files with a graph for train(), a graph for eval(), and the weights once. Programs
// link the target snug::exported. How to: docs/exported.md.
//
//   auto model = snug::load_exported("model.pt2");
//   snug::AdamW optimizer(model->parameters(), {.lr = 1e-3});
//   at::Tensor loss = model->forward({x, y});  // where the loss is part of the Python model
//   loss.backward();
//   optimizer.step();
//   snug::save_safetensors("model.safetensors", model->state_dict(), {{"format", "pt"}});  // for Python's load_model

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "snug/core.h"

namespace snug {

namespace detail {
struct ExportedProgram;
struct ExportedTensors;
}  // namespace detail

struct ExportedOptions {
  std::string train_program = "model";  ///< models/NAME.json in the file: the graph for train()
  std::string eval_program =
      "eval";  ///< the graph for eval(), of the same weights by name; eval() throws if the file has none
  /// Autocast regions of the graph keep the weights they cast, as torch.autocast does by default, although tracing
  /// writes into the file that regions keep nothing. Off: regions follow the file.
  bool autocast_cache = true;
};

/// Inputs that a program was not exported for. The message has input, dimension and the allowed values. The class does
/// not derive from ConfigError: for a Stepper that looks for a micro-batch, a number of items that does not fit is a
/// number that does not run.
class UnfitInput : public Error {
 public:
  using Error::Error;
};

/// A program of torch.export as a module. Parameters, buffers and their names equal the Python model's; train() and
/// eval() choose the graph.
class ExportedModule : public torch::nn::Module {
 public:
  /// The description of an input at export.
  struct Input {
    /// The range of a dimension.
    struct Size {
      int64_t least = 0, most = 0;  ///< equal: only this size fits; `most` is INT64_MAX if the range is open
    };
    std::string name;
    std::optional<at::ScalarType> dtype;  ///< none: the input is a number
    std::vector<Size> sizes;
  };

  /// Reads `file` and throws as load_exported() does.
  explicit ExportedModule(const std::filesystem::path& file, const ExportedOptions& options = {});
  ~ExportedModule() override;

  /// Returns the first output, which is a tensor. Inputs are in the order of input_names(). Throws UnfitInput for other
  /// numbers of inputs or dimensions, sizes outside their range, and other dtypes.
  at::Tensor forward(const std::vector<at::Tensor>& inputs);
  /// The same for inputs by name. Throws ConfigError for names that are missing or unknown.
  at::Tensor forward_named(const std::map<std::string, at::Tensor>& inputs);
  /// Returns all outputs, in the order of output_names(). Throws as forward() does, and Error if an output is not a
  /// tensor.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  /// The same as forward(), for a program whose first output is its loss. Throws ConfigError unless the first output is
  /// a scalar of a floating-point type.
  at::Tensor loss(const std::vector<at::Tensor>& inputs);

  /// The names of the exported program's inputs, in forward()'s order.
  const std::vector<std::string>& input_names() const { return input_names_; }
  /// The inputs of the graph for train().
  std::vector<Input> inputs() const;
  /// The names of outputs are keys of dicts and indices in tuples: {"loss", "logits"}, {"0", "1.hidden"}; {"output"} if
  /// Python returns a single tensor.
  const std::vector<std::string>& output_names() const;

  /// Chooses the graph. Throws ConfigError if the file has no graph for eval(): dropout and normalisations are fixed at
  /// export.
  void train(bool on = true) override;
  /// Casts floating-point tensors alone; torch's own to() also casts counters, indices and masks. dtypes in the graph
  /// remain.
  void to(at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

  /// Parameters and persistent buffers, detached, under Python's names. Tied weights appear once, under their first
  /// name.
  std::map<std::string, at::Tensor> state_dict() const;
  /// The further names of tied weights, each with the weight's name in state_dict().
  const std::map<std::string, std::string>& aliases() const;
  /// The number of operators in the graph for train(), operators in the graph's regions included.
  int64_t operators() const;

 private:
  const detail::ExportedProgram& program() const;

  std::unique_ptr<detail::ExportedTensors> tensors_;
  std::unique_ptr<detail::ExportedProgram> train_, eval_;  // eval_: null if the file has none
  std::string file_;
  std::vector<std::string> input_names_;
  bool autocast_cache_;
};

/// Reads a file of torch.export.save or snug_export.save, of torch 2.11 to 2.15. Tensors are on the CPU; move the
/// module with to(device). Nothing in the file is unpickled, and no record is read beyond the file's size. The graph's
/// operators run unchanged: a file can make the program take time and memory, as any model can. Throws:
/// - CorruptFile for a file that is damaged or does not follow the format;
/// - ConfigError, with the node and, if the file has it, the Python line, for unsupported programs: operators that this
///   program lacks, pickled tensors, programs for inference;
/// - Error if the file cannot be read.
inline std::shared_ptr<ExportedModule> load_exported(const std::filesystem::path& file,
                                                     const ExportedOptions& options = {}) {
  return std::make_shared<ExportedModule>(file, options);
}

}  // namespace snug
