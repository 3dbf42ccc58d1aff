#pragma once
// The types that snug's own optimizers share: the rules of options, the state of a parameter, and the work of an
// update.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "snug/fused_optimizer.h"
#include "snug/state.h"

namespace snug {

/// An optimizer's name, for messages, and the functions that check and save its options.
struct detail::OptionRules {
  std::string_view optimizer;
  /// Throws ConfigError if the options are of another optimizer, or out of range.
  void (*check)(std::string_view optimizer, const torch::optim::OptimizerOptions& options);
  /// The options under Python's names.
  StateDict (*to_state)(const torch::optim::OptimizerOptions& options);
  /// Throws ConfigError for options that are not offered.
  std::unique_ptr<torch::optim::OptimizerOptions> (*from_state)(std::string_view optimizer, const StateDict& state);
  /// Whether the defaults have one of torch's types. Then a field that a group leaves at torch's default takes the
  /// value of the defaults, as in torch.
  bool are_torchs = true;
};

/// The state of one parameter, under Python's names.
struct FusedOptimizer::ParameterState : torch::optim::OptimizerCloneableParamState<ParameterState> {
  /// The position of a tensor in the file, and a checksum for each written piece.
  struct InFile {
    int64_t offset = 0;
    std::vector<std::optional<uint64_t>> sums = {};
  };

  std::vector<std::pair<std::string_view, at::Tensor>> tensors;  // the names are literals in the optimizer's code
  at::Tensor made_for;  // the parameter's shape, strides and type without its values
  c10::Device device{c10::kCPU};
  bool is_fresh = true;                        // no update has used the state yet; a fresh state is not saved
  std::map<std::string_view, InFile> in_file;  // tensors in the file; `tensors` has meta tensors
  int64_t piece = 0;                           // the number of the parameter's elements in one piece of the file

  const at::Tensor& at(std::string_view name) const;
  at::Tensor& at(std::string_view name) { return const_cast<at::Tensor&>(std::as_const(*this).at(name)); }
  bool contains(std::string_view name) const;
};

/// The parameters of one group, device and dtype that are updated together.
struct FusedOptimizer::Work {
  const torch::optim::OptimizerOptions* options;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;  // each gradient has the memory layout of the parameter
  std::vector<ParameterState*> states;
  std::vector<uint64_t> first_elements;  // each parameter's first element, counted over all parameters
  at::Tensor grad_scale;                 // the divisor of the gradients; undefined: no division
  at::Tensor found_inf;                  // 1: the update changes nothing; undefined: the update goes on

  std::vector<at::Tensor> states_named(std::string_view name) const;
};

}  // namespace snug
