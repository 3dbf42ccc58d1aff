#include "src/step/places.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include "snug/core.h"
#include "src/core/allocated_bytes.h"
#include "src/core/file_memory.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

bool is_large(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.is_cpu() && tensor.storage().nbytes() >= in_file_from();
}

// `count` elements from `begin` on, in the order of memory.
at::Tensor elements(const at::Tensor& tensor, int64_t begin, int64_t count) {
  return tensor.as_strided({count}, {1}, tensor.storage_offset() + begin);
}

int64_t weight_bytes(const torch::nn::Module& model, const TrainedParameters& parameters) {
  AllocatedBytes bytes;
  for (const auto& tensors : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      bytes.add(tensor);
    }
  }
  for (const auto& [name, tensor] : parameters.full_precision()) {
    bytes.add(tensor);
  }
  return bytes.count();
}

// Of state that can leave memory, nearly all leaves. Counters of steps and a frozen parameter's state stay. Counting
// tensors in a file would read the tensors.
int64_t state_bytes(const torch::optim::Optimizer& optimizer, const PartInFile& in_file) {
  if (in_file.can_leave()) {
    return in_file.moved;
  }
  AllocatedBytes bytes;
  for (const at::Tensor& tensor : state_tensors(optimizer)) {
    bytes.add(tensor);
  }
  return bytes.count() + state_bytes_to_come(optimizer);
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
  const std::vector<c10::Storage> all = storages();
  return std::any_of(all.begin(), all.end(), [](const c10::Storage& one) { return FileMemory::holds(one.data()); });
}

PartInFile ModelPlace::bytes() const {
  PartInFile bytes;
  const auto has_hook = [](const auto& one) { return has_lasting_gradient_hook(one.second); };
  if (!can_leave() || std::any_of(parameters_.all().begin(), parameters_.all().end(), has_hook)) {
    return bytes;  // in files, a hook that the program has set would be lost
  }
  const std::vector<c10::Storage> all = storages();
  for (const c10::Storage& storage : all) {
    bytes.moved += static_cast<int64_t>(storage.nbytes());
  }
  bytes.beside = FileWindow::bytes_for(all);
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
    collect_gradients();
    window_.emplace(moved_);
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
  drop_gradients();
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

// --- gradients

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
    collect_gradients();
  } else {
    window_.reset();
    enter();
  }
  window_->let_go();
}

void ModelPlace::end() {
  lend_gradients(true);
  hooks_.reset();
}

void ModelPlace::drop_gradients() {
  hooks_.reset();
  gradients_.clear();
}

// A parameter that is frozen now keeps no file, because a frozen parameter gets no gradient.
void ModelPlace::collect_gradients() {
  const at::NoGradGuard no_grad;
  const AllocationsInFile files(*directory_);
  hooks_ = std::make_unique<GradientHooks>();
  std::unordered_map<const void*, Gradient> before = std::exchange(gradients_, {});
  for (const auto& [name, parameter] : parameters_.accumulated()) {
    const void* key = parameter.unsafeGetTensorImpl();
    const auto known = before.find(key);
    Gradient& gradient = gradients_[key];
    // The program may hold the gradient of the last step.
    const bool is_free =
        known != before.end() && known->second.sum.use_count() == 1 && known->second.sum.storage().use_count() == 1 &&
        known->second.sum.sizes() == parameter.sizes() && known->second.sum.strides() == parameter.strides() &&
        known->second.sum.scalar_type() == parameter.scalar_type();
    gradient.sum = is_free ? std::move(known->second.sum)
                           : at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options());
    hooks_->set(
        parameter, [&gradient](const at::Tensor& complete) { add(gradient, complete); },
        GradientHooks::Runs::InProfilesToo);
  }
}

// Adds with the bits of autograd's own sum, element by element.
void ModelPlace::add(Gradient& to, const at::Tensor& parameter) {
  constexpr int64_t kAtOnce = 1 << 20;  // elements
  const at::NoGradGuard no_grad;
  const UnseenOperators unseen;
  at::Tensor& from = parameter.mutable_grad();
  if (from.layout() != at::kStrided) {  // a first gradient of another layout stays in memory
    if (to.is_there) {
      to.sum.add_(from);
      from.reset();
    }
    return;
  }
  const bool is_first = !std::exchange(to.is_there, true);
  const auto add_some = [&](at::Tensor sum, const at::Tensor& more) {
    is_first ? sum.copy_(more) : sum.add_(more);
    let_go_of_pages(sum);
  };
  if (from.strides() == to.sum.strides() && from.is_non_overlapping_and_dense()) {
    for (int64_t begin = 0; begin < from.numel(); begin += kAtOnce) {
      const int64_t count = std::min(kAtOnce, from.numel() - begin);
      add_some(elements(to.sum, begin, count), elements(from, begin, count));
    }
  } else {
    add_some(to.sum, from);
  }
  from.reset();
}

void ModelPlace::lend_gradients(bool lent) {
  for (const auto& [name, parameter] : parameters_.accumulated()) {
    const auto found = gradients_.find(parameter.unsafeGetTensorImpl());
    at::Tensor& gradient = parameter.mutable_grad();
    if (found == gradients_.end() || !found->second.is_there) {
      continue;
    }
    if (lent && !gradient.defined()) {
      gradient = found->second.sum;
    } else if (!lent && gradient.is_same(found->second.sum)) {
      gradient.reset();
    }
  }
}

// --- the optimizer's state

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
  if (optimizer_ == nullptr || place == this->place()) {
    return;
  }
  const StatePlacement to = place == Place::File ? StatePlacement(file()) : StateOnDevice();
  if (!optimizer_->keep_state_in(to) && bytes().can_leave()) {
    throw ConfigError(
        "Stepper: the optimizer's keep_state_in returns false for a place of the state, although its "
        "bytes_with_state_in says that the state can be in a file; let bytes_with_state_in return zeros, or leave "
        "`offload` out");
  }
}

// --- bytes

BytesByKind bytes_by_kind(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                          const TrainedParameters& parameters, const ModelPlace& model_place,
                          const StatePlace& state_place, Placement placement) {
  BytesByKind bytes;
  bytes.weights.in_memory = weight_bytes(model, parameters);
  bytes.gradients.in_memory = parameters.bytes_of_all_gradients();
  const PartInFile state_in_file = state_place.bytes();
  bytes.optimizer_state.in_memory = state_bytes(optimizer, state_in_file);
  if (placement.state == Place::File) {
    bytes.optimizer_state.outside = state_in_file.moved;
    bytes.optimizer_state.in_memory -= bytes.optimizer_state.outside;
  }
  if (placement.model == Place::File) {
    const PartInFile in_file = model_place.bytes();
    const int64_t window = model_place.window_bytes(), small_gradients = in_file.beside - window;
    bytes.weights.outside = in_file.moved;
    bytes.weights.in_memory += window - in_file.moved;
    bytes.gradients.outside = bytes.gradients.in_memory - small_gradients;
    bytes.gradients.in_memory = small_gradients;
  }
  return bytes;
}

}  // namespace snug::detail
