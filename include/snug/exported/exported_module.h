#pragma once
// A model that Python saved by torch.export.save, as a torch::nn::Module that trains in C++. The file holds a graph of
// operators and the weights. Operators are called one by one through LibTorch's dispatcher, so autograd, autocast,
// plans and budgets see what they would see of the same model in C++, and losses, gradients and weights have Python's
// bits. python/snug_export.py saves such files with a graph for train() and one for eval(), the weights once. How to:
// docs/exported.md.
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
  /// Autocast regions of the graph keep the weights they cast, as torch.autocast does by default; tracing writes that
  /// they do not. Off: as the file says.
  bool autocast_cache = true;
};

/// Inputs that a program was not exported for: the message has input, dimension and what is allowed there. No
/// ConfigError: for a Stepper that looks for a micro-batch, a number of items that does not fit is one that does not
/// run.
class UnfitInput : public Error {
 public:
  using Error::Error;
};

/// An input as a program was exported for it.
struct ExportedInput {
  /// The range of a dimension.
  struct Size {
    int64_t least = 0, most = 0;  ///< equal: the program takes this size alone; `most` is INT64_MAX where it is open
  };
  std::string name;
  std::optional<at::ScalarType> dtype;  ///< none: it is a number
  std::vector<Size> sizes;
};

/// A program of torch.export as a module. Parameters, buffers and their names are those of the Python model; train()
/// and eval() choose the graph.
class ExportedModule : public torch::nn::Module {
 public:
  /// As load_exported.
  explicit ExportedModule(const std::filesystem::path& file, const ExportedOptions& options = {});
  ~ExportedModule() override;

  /// The first output, which is a tensor, of inputs in the order of input_names(). Throws UnfitInput for other numbers
  /// of inputs or dimensions, sizes outside their range, other dtypes.
  at::Tensor forward(const std::vector<at::Tensor>& inputs);
  /// The same of inputs by name. Throws ConfigError for names that are missing or unknown.
  at::Tensor forward_named(const std::map<std::string, at::Tensor>& inputs);
  /// All outputs, in the order of output_names(). Throws as forward does, and Error if an output is no tensor.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  /// As forward, of a program whose first output is its loss. Throws ConfigError unless it is a scalar of a
  /// floating-point type.
  at::Tensor loss(const std::vector<at::Tensor>& inputs);

  /// In the order in which forward() takes them, as the exported program names them.
  const std::vector<std::string>& input_names() const { return input_names_; }
  /// Of the graph for train().
  std::vector<ExportedInput> inputs() const;
  /// Keys of dicts and places in tuples: {"loss", "logits"}, {"0", "1.hidden"}; {"output"} where Python returns one
  /// tensor.
  const std::vector<std::string>& output_names() const;

  /// Chooses the graph. Throws ConfigError if the file has none for eval(): dropout and normalisations are fixed at
  /// export.
  void train(bool on = true) override;
  /// Casts floating-point tensors alone; torch's own casts counters, indices and masks, too. dtypes in the graph
  /// remain.
  void to(at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

  /// Parameters and persistent buffers, detached, under Python's names; tied weights once, under the first.
  std::map<std::string, at::Tensor> state_dict() const;
  /// Further names of tied weights, each with the name that it has in state_dict().
  const std::map<std::string, std::string>& aliases() const;
  /// Operators in the graph for train(), those in its regions included.
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
/// operators run as they are: a file can make the program take time and memory, as any model can. Throws CorruptFile
/// for a file that is damaged or does not follow the format; ConfigError, with the node and the Python line where the
/// file has it, for what is not supported: operators that this program lacks, pickled tensors, programs for inference;
/// Error if the file cannot be read.
inline std::shared_ptr<ExportedModule> load_exported(const std::filesystem::path& file,
                                                     const ExportedOptions& options = {}) {
  return std::make_shared<ExportedModule>(file, options);
}

}  // namespace snug
