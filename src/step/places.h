#pragma once
// The places of the parts of a step that BudgetOptions::offload lets go to files or to the host. The planner decides.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include "snug/optimizer.h"
#include "snug/step_plan.h"
#include "src/activations/host_home.h"
#include "src/memory/gradients_outside.h"
#include "src/memory/weight_window.h"
#include "src/step/step_to_plan.h"
#include "src/step/trained_parameters.h"

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// The place of a model's weights, large buffers and gradients: of a CPU in files, of another device on the host, with
/// masters; there buffers stay. Weights and buffers keep their storages. Only the memory of the storages changes, so
/// all tensors on the storages move too. Gradients are collected outside (GradientsOutside), and are the parameters'
/// gradients, on the CPU, at the end of the step.
///
/// Between steps, weights on the host stay there. Each operator that the thread of the last step calls, and each
/// backward pass of the thread, brings the weights that it uses. Other accesses throw (HostHome).
class ModelPlace {
 public:
  /// `directory`: for the files; none: the model stays in memory.
  ModelPlace(torch::nn::Module& model, const TrainedParameters& parameters,
             std::optional<std::filesystem::path> directory)
      : model_(model), parameters_(parameters), directory_(std::move(directory)) {}
  /// Weights on the host come back to the device. If the device has no room, everything stays as it is until another
  /// ModelPlace takes all weights of the model to the host, or until the end of the process.
  ~ModelPlace();
  ModelPlace(const ModelPlace&) = delete;
  ModelPlace& operator=(const ModelPlace&) = delete;

  bool can_leave() const { return directory_.has_value(); }
  Place place() const { return window_ ? outside() : Place::Memory; }
  /// The place outside of the device's memory.
  Place outside() const { return place_outside(parameters_.device()); }
  /// Whether a part of the model was made outside (TensorsInFile, move_with_weights_on_host).
  bool was_made_outside() const;
  PartInFile bytes() const;
  /// The bytes of PartInFile::beside for the window through which weights pass, at its smallest.
  int64_t window_bytes() const { return window_for(outside() == Place::Host ? 2 : 1); }
  /// The bytes by which the window is larger.
  int64_t spare() const { return spare_; }
  /// No effect if the model is in the place already, or cannot leave. Throws Error if files cannot be made, and as an
  /// allocation does; place() is then as before. Exception: if weights have left the device, and another user of the
  /// device takes the room before the window is allocated, then weights may find no room to come back. place() is then
  /// Host, without a window until the next put() or begin(). Drops gradients that were collected.
  ///
  /// `spare`: bytes by which the window may be larger, so that weights stay in the window from one operator to a later
  /// operator. A larger window that has no room throws as an allocation does; spare() is then 0.
  void put(Place place, int64_t spare = 0);

  // No effect while the model is in memory:

  /// Begins a window of micro-batches without gradients. Gradients of the parameters that are trained now will be
  /// collected. Weights whose storages were exchanged are moved again. Throws ConfigError for a hook of the program
  /// that would take the gradients, and as put() does.
  void begin();
  /// Within the window: the collected gradients become the parameters' gradients (true), or stop being the parameters'.
  void lend_gradients(bool lent) { gradients_.lend(parameters_.accumulated(), lent); }
  /// Ends the window. Gradients are the parameters' own: backward passes of the program add to the gradients.
  void end();
  /// Ends the window, and drops the gradients.
  void drop_gradients() { gradients_.drop(); }

 private:
  std::vector<c10::Storage> storages() const;
  bool is_outside(const c10::Storage& storage) const;
  std::optional<std::filesystem::path> directory_of_gradients() const;
  int64_t window_for(size_t largest) const;
  void go_to(Place place);
  void widen(int64_t spare);
  void enter();
  void enter_host();
  void open_window();
  void leave();
  void move(Place to);

  torch::nn::Module& model_;
  const TrainedParameters& parameters_;
  std::optional<std::filesystem::path> directory_;
  std::unique_ptr<FileHome> in_files_;
  std::unique_ptr<HostHome> on_host_;
  std::unique_ptr<WeightWindow> window_;
  int64_t spare_ = 0;
  std::vector<c10::Storage> moved_;
  GradientsOutside gradients_;
};

/// The place of the optimizer's state.
class StatePlace {
 public:
  /// `directory`: for the file; on another device than the CPU the state goes to the host. Without a directory the
  /// state stays in memory.
  StatePlace(torch::optim::Optimizer& optimizer, std::optional<std::filesystem::path> directory, c10::Device device);

  PartInFile bytes() const;
  Place place() const {
    const bool stays = optimizer_ == nullptr || std::holds_alternative<StateOnDevice>(optimizer_->state_placement());
    return stays ? Place::Memory : outside();
  }
  /// The place outside of the device's memory.
  Place outside() const { return outside_; }
  /// Whether the state must be outside.
  bool must_leave() const { return optimizer_ != nullptr && !optimizer_->may_stay_on_device(); }
  /// No effect if the state is in the place already, or cannot leave. Throws Error if the file cannot be used,
  /// ConfigError if the optimizer refuses a place for which the optimizer gives bytes, and as an allocation does; then
  /// the state is in the former place.
  void put(Place place);

 private:
  StatePlacement placement_outside() const;

  Place outside_;
  MovableState* optimizer_ = nullptr;
  std::filesystem::path directory_;
};

}  // namespace snug::detail
