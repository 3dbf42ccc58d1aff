#include "src/step/step_bytes.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "src/core/allocated_bytes.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/backward_pass.h"

namespace snug::detail {
namespace {

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

StateToCome::StateToCome(const torch::optim::Optimizer& optimizer, const TrainedParameters& parameters)
    : optimizer_(optimizer), parameters_(parameters), bytes_(state_bytes_to_come(optimizer)) {}

void StateToCome::note(const at::Tensor& loss) {
  for (const at::Tensor& leaf : leaves_of(loss)) {
    reached_.insert(parameters_.accumulated_for(leaf).unsafeGetTensorImpl());
  }
}

int64_t StateToCome::idle_bytes() const {
  return bytes_ - state_bytes_to_come(optimizer_, [this](const at::Tensor& parameter) {
           return parameter.requires_grad() && reached_.contains(parameter.unsafeGetTensorImpl());
         });
}

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
