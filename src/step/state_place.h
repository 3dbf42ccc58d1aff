#pragma once
// StatePlace: the place of the optimizer's state. With BudgetOptions::offload the place may be a file; the planner
// decides.

#include <filesystem>
#include <optional>
#include <variant>

#include <c10/core/Device.h>

#include "snug/optimizer.h"
#include "src/step/placement.h"

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

class StatePlace {
 public:
  /// `directory`: for the file. Without a directory, or on another device than the CPU, the state stays in memory.
  StatePlace(torch::optim::Optimizer& optimizer, std::optional<std::filesystem::path> directory, c10::Device device);

  PartInFile bytes() const;
  Place place() const {
    const bool is_in_file = optimizer_ != nullptr && std::holds_alternative<StateFile>(optimizer_->state_placement());
    return is_in_file ? Place::File : Place::Memory;
  }
  /// No effect if the state is in the place already, or cannot leave. Throws Error if the file cannot be used, and as
  /// an allocation does; then the state is in the former place.
  void put(Place place);

 private:
  StateFile file() const;

  MovableState* optimizer_ = nullptr;
  std::filesystem::path directory_;
};

}  // namespace snug::detail
