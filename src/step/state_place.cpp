#include "src/step/state_place.h"

#include <algorithm>
#include <utility>

#include <torch/optim/optimizer.h>

#include "src/core/optimizer_capabilities.h"

namespace snug::detail {

StatePlace::StatePlace(torch::optim::Optimizer& optimizer, std::optional<std::filesystem::path> directory,
                       c10::Device device)
    : optimizer_(directory && device.is_cpu() ? capabilities_of(optimizer).movable_state : nullptr),
      directory_(std::move(directory).value_or("")) {}

// The window is an eighth of the state, and depends on no budget: a smallest budget that is told must be sufficient.
StateFile StatePlace::file() const {
  constexpr int64_t kShare = 8, kLeast = int64_t{192} << 10;
  const StateFile most{.directory = directory_};
  const int64_t moved = optimizer_->bytes_with_state_in(most).moved;
  return {.directory = directory_, .window = Bytes(std::clamp(moved / kShare, kLeast, most.window.count()))};
}

PartInFile StatePlace::bytes() const {
  const auto bytes = optimizer_ == nullptr ? MovableState::PlacementBytes() : optimizer_->bytes_with_state_in(file());
  return {.moved = bytes.moved, .workspace = bytes.workspace};
}

void StatePlace::put(Place place) {
  if (optimizer_ != nullptr && place != this->place()) {
    optimizer_->keep_state_in(place == Place::File ? StatePlacement(file()) : StateOnDevice());
  }
}

}  // namespace snug::detail
