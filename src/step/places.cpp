#include "src/step/places.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include "snug/core.h"
#include "src/core/file_memory.h"
#include "src/core/gradient_hooks.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/cpu_allocator.h"

namespace snug::detail {
namespace {

bool is_large(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.is_cpu() && tensor.storage().nbytes() >= in_file_from();
}

}  // namespace

std::vector<c10::Storage> ModelPlace::storages() const {
  std::vector<c10::Storage> all;
  std::unordered_set<const void*> seen;
  for (const auto& tensors : {model_.parameters(), model_.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      if (is_large(tensor) && seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
        all.push_back(tensor.storage());
      }
    }
  }
  return all;
}

bool ModelPlace::was_made_in_file() const {
  return std::ranges::any_of(storages(), [](const c10::Storage& one) { return FileMemory::holds(one.data()); });
}

PartInFile ModelPlace::bytes() const {
  PartInFile bytes;
  const auto has_hook = [](const auto& one) { return has_lasting_gradient_hook(one.second); };
  if (!can_leave() || std::ranges::any_of(parameters_.all(), has_hook)) {
    return bytes;  // in files, a hook that the program has set would be lost
  }
  const std::vector<c10::Storage> all = storages();
  for (const c10::Storage& storage : all) {
    bytes.moved += static_cast<int64_t>(storage.nbytes());
  }
  bytes.beside = WeightWindow::bytes_for(all);
  for (const auto& [name, parameter] : parameters_.accumulated()) {
    bytes.beside += parameter.nbytes() < in_file_from() ? static_cast<int64_t>(parameter.nbytes()) : 0;
  }
  return bytes;
}

void ModelPlace::put(Place place) {
  if (place == this->place() || (place == Place::File && !bytes().can_leave())) {
    return;
  }
  if (place == Place::File) {
    enter();
    return;
  }
  try {
    leave();
  } catch (...) {
    enter();
    throw;
  }
}

// Weights move first, and leave room for the small part of the gradients. If the rest has no room, weights come back.
void ModelPlace::enter() {
  try {
    move(Place::File);
    gradients_.collect(parameters_.accumulated(), *directory_);
    const int64_t window = WeightWindow::bytes_for(moved_);
    home_ = std::make_unique<FileHome>(moved_, window);
    window_.emplace(moved_, *home_, window);
  } catch (...) {
    try {
      leave();
    } catch (const std::exception&) {  // the weights stay in their files, and are correct in the files
    }
    throw;
  }
}

void ModelPlace::leave() {
  window_.reset();
  home_.reset();
  gradients_.drop();
  move(Place::Memory);
}

// Allocates all memory first, so that nothing has moved if memory is too little.
void ModelPlace::move(Place to) {
  const bool in_file = to == Place::File;
  std::vector<std::pair<c10::Storage, c10::DataPtr>> moves;
  const std::vector<c10::Storage> all = storages();
  moved_.clear();  // also of storages that the model no longer has
  {
    const auto files = in_file ? std::make_unique<AllocationsInFile>(*directory_) : nullptr;
    for (const c10::Storage& storage : all) {
      if (FileMemory::holds(storage.data()) != in_file) {
        moves.emplace_back(storage, c10::GetCPUAllocator()->allocate(storage.nbytes()));
      }
    }
  }
  for (auto& [storage, memory] : moves) {
    const void* const place = memory.get();
    std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    FileMemory::let_go(place, static_cast<int64_t>(storage.nbytes()));
  }
  if (in_file) {
    moved_ = all;
  }
}

void ModelPlace::begin() {
  if (!window_) {
    return;
  }
  for (const auto& [name, parameter] : parameters_.accumulated()) {
    if (has_lasting_gradient_hook(parameter)) {
      throw ConfigError(
          fmt::format("Stepper: parameter '{}' has got a hook that runs when its gradient is complete, while its "
                      "gradient goes to a file; set the hook before the Stepper is made, or leave `offload` out",
                      name));
    }
  }
  const auto is_as_before = [](const c10::Storage& now, const c10::Storage& before) {
    return now.unsafeGetStorageImpl() == before.unsafeGetStorageImpl() && FileMemory::holds(now.data());
  };
  const std::vector<c10::Storage> now = storages();
  if (std::equal(now.begin(), now.end(), moved_.begin(), moved_.end(), is_as_before)) {
    gradients_.collect(parameters_.accumulated(), *directory_);
  } else {
    window_.reset();
    home_.reset();
    enter();
  }
  window_->let_go();
}

void ModelPlace::end() {
  lend_gradients(true);
  gradients_.stop();
}

// --- the optimizer's state

StatePlace::StatePlace(torch::optim::Optimizer& optimizer, std::optional<std::filesystem::path> directory,
                       c10::Device device)
    : outside_(place_outside(device)),
      optimizer_(directory ? capabilities_of(optimizer).movable_state : nullptr),
      directory_(std::move(directory).value_or("")) {}

// A window in the budgeted memory is an eighth of the state, and depends on no budget: a smallest budget that is told
// must be sufficient.
StatePlacement StatePlace::placement_outside() const {
  if (outside_ == Place::Host) {
    return StateOnHost();
  }
  constexpr int64_t kShare = 8, kLeast = int64_t{192} << 10;
  const StateFile most{.directory = directory_};
  const int64_t moved = optimizer_->bytes_with_state_in(most).moved;
  return StateFile{.directory = directory_, .window = Bytes(std::clamp(moved / kShare, kLeast, most.window.count()))};
}

PartInFile StatePlace::bytes() const {
  const auto bytes =
      optimizer_ == nullptr ? MovableState::PlacementBytes() : optimizer_->bytes_with_state_in(placement_outside());
  return {.moved = bytes.moved, .workspace = bytes.workspace};
}

void StatePlace::put(Place place) {
  if (optimizer_ == nullptr || place == this->place()) {
    return;
  }
  const StatePlacement to = place == Place::Memory ? StateOnDevice() : placement_outside();
  if (!optimizer_->keep_state_in(to) && bytes().can_leave()) {
    throw ConfigError(
        "Stepper: the optimizer's keep_state_in returns false for a place of the state, although its "
        "bytes_with_state_in says that the state can be elsewhere; let bytes_with_state_in return zeros, or leave "
        "`offload` out");
  }
}

}  // namespace snug::detail
