#pragma once
// StatePlace: the place of the optimizer's state. With StepperOptions::offload the place may be a file; the planner
// decides.

#include <filesystem>
#include <optional>
#include <variant>

#include <c10/core/Device.h>

#include "snug/optimizer.h"

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

class StatePlace {
 public:
  /// `directory`: for the file. Without a directory, or on another device than the CPU, the state stays in memory.
  StatePlace(torch::optim::Optimizer& optimizer, std::optional<std::filesystem::path> directory, c10::Device device);

  /// The bytes that go to the file, and the workspace of an update from the file. Zeros: the state cannot leave.
  StatePlacementBytes bytes() const;
  bool is_in_file() const {
    return optimizer_ != nullptr && std::holds_alternative<StateFile>(optimizer_->state_placement());
  }
  /// No effect if the state is in the place already, or cannot leave. Throws Error if the file cannot be used, and as
  /// an allocation does; then the state is in the former place.
  void put(bool in_file);

 private:
  StateFile file() const;

  MovableState* optimizer_ = nullptr;
  std::filesystem::path directory_;
};

}  // namespace snug::detail
