#pragma once
// ModelPlace: where a model's weights, large buffers and gradients are. With StepperOptions::offload they may be in
// files; the planner decides. Weights and buffers keep their storages, whose memory changes, so that all tensors on
// them go along. A gradient goes to its file when backward has completed it, and is added there to those of earlier
// micro-batches; at the end of the step it is the parameter's gradient.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include "src/core/gradient_hooks.h"
#include "src/memory/file_window.h"
#include "src/step/step_to_plan.h"
#include "src/step/trained_parameters.h"

namespace snug::detail {

class ModelPlace {
 public:
  /// `directory`: of the files; none: the model stays in memory.
  ModelPlace(torch::nn::Module& model, const TrainedParameters& parameters,
             std::optional<std::filesystem::path> directory)
      : model_(model), parameters_(parameters), directory_(std::move(directory)) {}

  bool can_leave() const { return directory_.has_value(); }
  bool is_in_file() const { return window_.has_value(); }
  /// Whether some of it was made in files (TensorsInFile).
  bool was_made_in_file() const;
  /// What the files take, and what stays in memory in their place. Zeros: the model cannot leave.
  ModelFileBytes bytes() const;
  /// Of what is beside: the window through which weights pass.
  int64_t window_bytes() const { return FileWindow::bytes_for(storages()); }
  /// No effect where it is there, or cannot leave. Throws Error if there can be no file, and as an allocation does;
  /// then is_in_file() is as before. Drops gradients that were collected.
  void put(bool in_file);

  // Without effect while the model is in memory:

  /// A window of micro-batches begins: no gradients are there, and those of the parameters that are trained now will be
  /// collected. Weights whose storages were exchanged are moved again. Throws ConfigError for a hook of the program's
  /// that would take the gradients, and as put() does.
  void begin();
  /// In the window: they are the parameters' gradients, or are so no longer.
  void lend_gradients();
  void take_gradients_back();
  /// The window is over, and gradients are the parameters' own: backward passes of the program add to them.
  void end();
  /// It is over, and they are not wanted.
  void drop_gradients();

 private:
  struct Gradient {
    at::Tensor sum;
    bool is_there = false;
  };

  std::vector<c10::Storage> storages() const;
  void enter();
  void leave();
  void move(bool in_file);
  void collect_gradients();
  static void add(Gradient& to, const at::Tensor& parameter);

  torch::nn::Module& model_;
  const TrainedParameters& parameters_;
  std::optional<std::filesystem::path> directory_;
  std::optional<FileWindow> window_;
  std::vector<c10::Storage> moved_;
  std::unordered_map<const void*, Gradient> gradients_;  // by parameter
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace snug::detail
