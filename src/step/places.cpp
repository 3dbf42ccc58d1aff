#include "src/step/places.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <unordered_set>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include "snug/core.h"
#include "src/core/allocated_bytes.h"
#include "src/core/file_memory.h"
#include "src/core/gradient_hooks.h"
#include "src/core/has_bytes.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/absent_storage.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

// The storages of large tensors on `device`, each once.
std::vector<c10::Storage> large_storages(const std::vector<std::vector<at::Tensor>>& all_tensors, c10::Device device) {
  std::vector<c10::Storage> all;
  std::unordered_set<const void*> seen;
  for (const auto& tensors : all_tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage() && tensor.device() == device &&
          tensor.storage().nbytes() >= in_file_from() && seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
        all.push_back(tensor.storage());
      }
    }
  }
  return all;
}

// All values are on the host when the call returns, and nothing uses the window.
void take_out(WeightWindow& window, HostHome& home, size_t storages) {
  window.let_go();
  for (size_t i = 0; i < storages; ++i) {
    home.finish_copies(i);
  }
}

// The weights of models that found no room on the device at the end of a ModelPlace, with the windows through which
// operators bring the weights.
class WeightsThatStay {
 public:
  struct Model {
    std::vector<c10::Storage> weights;
    size_t storages;  // of home and window: weights and masters
    std::unique_ptr<HostHome> home;
    std::unique_ptr<WeightWindow> window;
  };

  static WeightsThatStay& in_process() {
    static auto* const all = new WeightsThatStay;  // devices may end before statics
    return *all;
  }

  void add(Model model) {
    const std::lock_guard lock(mutex_);
    models_.push_back(std::move(model));
  }

  /// Ends the windows of models whose weights are all among `storages`, or are gone. The storages keep their values.
  void hand_over(const std::vector<c10::Storage>& storages) {
    constexpr size_t kOwn = 3;  // uses of a storage: `weights`, `home` and `window`
    const auto is_there = [&](const c10::Storage& weight) {
      return weight.use_count() == kOwn || std::ranges::any_of(storages, [&](const c10::Storage& one) {
               return one.unsafeGetStorageImpl() == weight.unsafeGetStorageImpl();
             });
    };
    const std::lock_guard lock(mutex_);
    for (auto model = models_.begin(); model != models_.end();) {
      if (!std::ranges::all_of(model->weights, is_there)) {
        ++model;
        continue;
      }
      take_out(*model->window, *model->home, model->storages);
      model = models_.erase(model);
    }
  }

 private:
  std::mutex mutex_;
  std::list<Model> models_;
};

}  // namespace

ModelPlace::~ModelPlace() {
  if (!on_host_) {
    return;
  }
  try {
    leave();
  } catch (const std::exception&) {  // the values are only there
    WeightsThatStay::in_process().add({.weights = large_storages({model_.parameters()}, parameters_.device()),
                                       .storages = moved_.size(),
                                       .home = std::move(on_host_),
                                       .window = std::move(window_)});
  }
}

// Some operators write buffers without saying so, such as batch normalisation. A buffer in a file is written in place.
std::vector<c10::Storage> ModelPlace::storages() const {
  const c10::Device device = parameters_.device();
  std::vector<at::Tensor> masters;
  for (const auto& [name, parameter] : parameters_.full_precision()) {
    masters.push_back(parameter);
  }
  return large_storages({model_.parameters(), device.is_cpu() ? model_.buffers() : masters}, device);
}

// For so many of the largest storages, or for all. In a step no operator takes a master.
int64_t ModelPlace::window_for(size_t largest) const {
  return outside() == Place::Host
             ? HostHome::window_for(large_storages({model_.parameters()}, parameters_.device()), largest)
             : WeightWindow::bytes_for(storages(), static_cast<int64_t>(largest));
}

bool ModelPlace::is_outside(const c10::Storage& storage) const {
  const c10::DataPtr& memory = memory_of(storage);
  return outside() == Place::Host ? is_borrowed_or_absent(memory) : FileMemory::holds(memory.get());
}

std::optional<std::filesystem::path> ModelPlace::directory_of_gradients() const {
  return outside() == Place::Host ? std::nullopt : directory_;
}

bool ModelPlace::was_made_outside() const {
  return std::ranges::any_of(storages(), [this](const c10::Storage& one) { return is_outside(one); });
}

PartInFile ModelPlace::bytes() const {
  PartInFile bytes;
  const auto has_hook = [](const auto& one) { return has_lasting_gradient_hook(one.second); };
  if (!can_leave() || std::ranges::any_of(parameters_.all(), has_hook)) {
    return bytes;  // of gradients outside, a hook that the program has set would be lost
  }
  const std::vector<c10::Storage> all = storages();
  for (const c10::Storage& storage : all) {
    bytes.moved += allocated_bytes(static_cast<int64_t>(storage.nbytes()), storage.device());
  }
  bytes.beside = window_bytes();
  for (const auto& [name, parameter] : parameters_.accumulated()) {
    const bool stays = outside() == Place::File && parameter.nbytes() < in_file_from();
    bytes.beside += stays ? static_cast<int64_t>(parameter.nbytes()) : 0;
  }
  return bytes;
}

void ModelPlace::put(Place place, int64_t spare) {
  go_to(place);
  widen(spare);
}

void ModelPlace::go_to(Place place) {
  if (place == this->place()) {
    open_window();
    return;
  }
  if (place != Place::Memory && !bytes().can_leave()) {
    return;
  }
  if (place != Place::Memory) {
    enter();
    return;
  }
  try {
    leave();
  } catch (...) {
    if (!window_) {
      enter();
    }
    throw;
  }
}

void ModelPlace::widen(int64_t spare) {
  if (!window_) {
    return;
  }
  const int64_t least = window_bytes(), more = std::min(spare, window_for(storages().size()) - least);
  if (!window_->should_widen(spare_, more)) {
    return;
  }
  window_->let_go();
  window_->resize(least);
  spare_ = 0;
  if (on_host_) {
    on_host_->open_window(least + more);
  } else {
    in_files_->widen(more);
  }
  window_->resize(least + more);
  spare_ = more;
}

// Weights move first, and leave room for the small part of the gradients. If the rest has no room, weights come back.
void ModelPlace::enter() {
  if (outside() == Place::Host) {
    enter_host();
    return;
  }
  try {
    move(Place::File);
    gradients_.collect(parameters_.leaves(), *directory_);
    const int64_t window = WeightWindow::bytes_for(moved_);
    spare_ = 0;
    in_files_ = std::make_unique<FileHome>(moved_, window);
    window_ = std::make_unique<WeightWindow>(moved_, *in_files_, window);
  } catch (...) {
    try {
      leave();
    } catch (const std::exception&) {  // the weights stay in their files, and are correct in the files
    }
    throw;
  }
}

// The new home takes over the values of weights that are on the host already. Other weights leave the device, and leave
// room for the window. If the window has no room, weights come back. If they have no room either, they stay on the
// host, and the window is empty.
void ModelPlace::enter_host() {
  std::vector<c10::Storage> all = storages();
  if (all.empty()) {  // the model has lost its large weights
    leave();
    return;
  }
  if (on_host_) {
    take_out(*window_, *on_host_, moved_.size());
  }
  WeightsThatStay::in_process().hand_over(all);
  auto home = std::make_unique<HostHome>(all);
  gradients_.collect(parameters_.leaves(), directory_of_gradients());
  auto window = std::make_unique<WeightWindow>(all, *home, window_bytes());
  keep_seam_for_windows();
  home->take_out();
  window_ = std::move(window);
  on_host_ = std::move(home);
  moved_ = std::move(all);
  spare_ = 0;
  try {
    open_window();
  } catch (...) {
    try {
      leave();
    } catch (const std::exception&) {
    }
    throw;
  }
}

// No effect if the weights have a window, or are in memory.
void ModelPlace::open_window() {
  if (on_host_ && !on_host_->has_window()) {
    on_host_->open_window(window_bytes());
  }
}

void ModelPlace::leave() {
  if (on_host_) {
    window_->let_go();
    if (std::exchange(spare_, 0) > 0) {
      on_host_->close_window();
      window_->resize(window_bytes());
    }
    on_host_->take_back();
  }
  window_.reset();
  in_files_.reset();
  on_host_.reset();
  spare_ = 0;
  gradients_.drop();
  if (outside() == Place::File) {
    move(Place::Memory);
  }
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
  for (const auto& [name, parameter] : parameters_.all()) {
    if (has_lasting_gradient_hook(parameter)) {
      throw ConfigError(
          fmt::format("Stepper: parameter '{}' has got a hook that runs when its gradient is complete, while its "
                      "gradient leaves memory; set the hook before the Stepper is made, or leave `offload` out",
                      name));
    }
  }
  const auto is_as_before = [this](const c10::Storage& now, const c10::Storage& before) {
    return now.unsafeGetStorageImpl() == before.unsafeGetStorageImpl() && is_outside(now);
  };
  if (on_host_) {
    keep_seam_for_windows();
    open_window();
  }
  const std::vector<c10::Storage> now = storages();
  if (std::equal(now.begin(), now.end(), moved_.begin(), moved_.end(), is_as_before)) {
    gradients_.collect(parameters_.leaves(), directory_of_gradients());
  } else if (on_host_) {
    enter();
  } else {
    window_.reset();
    in_files_.reset();
    enter();
  }
  if (window_) {
    window_->let_go();
  }
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
