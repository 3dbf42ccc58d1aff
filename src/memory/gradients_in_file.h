#pragma once
// GradientsInFile: gradients that are collected in files (AllocationsInFile). A gradient goes to the gradient's file
// when backward has completed the gradient, and is added to the gradients of earlier backward passes in the file. The
// sum in the file becomes the parameter's gradient when the gradients are lent.

#include <filesystem>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/core/gradient_hooks.h"

namespace snug::detail {

class GradientsInFile {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// From here on, gradients of `parameters` are collected, without those that were collected before. Other parameters
  /// keep no file. `parameters` must have no gradient hooks. Throws Error if files cannot be made, and as an allocation
  /// does.
  void collect(const NamedTensors& parameters, const std::filesystem::path& directory);
  /// The collected gradients become the gradients of `parameters` (true), or stop being the gradients (false).
  void lend(const NamedTensors& parameters, bool lent);
  /// Gradients of later backward passes are added to the parameters' own gradients, as in plain training.
  void stop() { hooks_.reset(); }
  /// Stops, and drops the collected gradients.
  void drop();

 private:
  struct Gradient {
    at::Tensor sum;
    bool is_there = false;
  };

  static void add(Gradient& to, const at::Tensor& parameter);

  std::unordered_map<const void*, Gradient> gradients_;  // by parameter
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace snug::detail
