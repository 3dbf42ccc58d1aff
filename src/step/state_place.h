#pragma once
// StatePlace: where the optimizer's state is. With StepperOptions::offload it may be in a file; the planner decides.

#include <filesystem>
#include <optional>

#include <c10/core/Device.h>

#include "snug/stateful_optimizer.h"

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

class StatePlace {
 public:
  /// `directory`: of the file. None, or another device than the CPU: the state stays in memory.
  StatePlace(torch::optim::Optimizer& optimizer, std::optional<std::filesystem::path> directory, c10::Device device);

  /// What the file takes and gives. Zeros: the state cannot leave.
  StateFileBytes bytes() const;
  bool is_in_file() const { return optimizer_ != nullptr && optimizer_->is_state_in_file(); }
  /// No effect where it is there, or cannot leave. Throws Error if the file cannot be used, and as an allocation does;
  /// then it is where it was.
  void put(bool in_file);

 private:
  StateFile file() const;

  StatefulOptimizer* optimizer_ = nullptr;
  std::filesystem::path directory_;
};

}  // namespace snug::detail
