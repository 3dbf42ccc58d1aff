#include "snug/step/detail/bytes_by_kind.h"

#include <cstdint>
#include <unordered_set>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "snug/core/detail/allocated_bytes.h"
#include "snug/memory/detail/optimizer_tensors.h"
#include "snug/step/detail/optimizer_bytes.h"

namespace snug::detail {
namespace {

// Each storage once.
class Sum {
 public:
  void add(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      bytes_ += allocated_bytes(static_cast<int64_t>(tensor.storage().nbytes()), tensor.device());
    }
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::unordered_set<const void*> seen_;
  int64_t bytes_ = 0;
};

int64_t weight_bytes(const torch::nn::Module& model, const TrainedParameters& parameters) {
  Sum sum;
  for (const auto& tensors : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      sum.add(tensor);
    }
  }
  for (const auto& [name, tensor] : parameters.full_precision()) {
    sum.add(tensor);
  }
  return sum.bytes();
}

// Where the state can leave, what leaves is nearly all: counters of steps and a frozen parameter's state do not. To
// count tensors in a file would read them.
int64_t state_bytes(const torch::optim::Optimizer& optimizer, const StatePlace& place) {
  if (place.bytes().moved > 0) {
    return place.bytes().moved;
  }
  Sum sum;
  for (const at::Tensor& tensor : state_tensors(optimizer)) {
    sum.add(tensor);
  }
  return sum.bytes() + state_bytes_to_come(optimizer);
}

}  // namespace

BytesByKind bytes_by_kind(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                          const TrainedParameters& parameters, const ModelPlace& model_place,
                          const StatePlace& state_place, InFiles what) {
  BytesByKind bytes;
  bytes.weights.in_memory = weight_bytes(model, parameters);
  bytes.gradients.in_memory = parameters.bytes_of_all_gradients();
  bytes.optimizer_state.in_memory = state_bytes(optimizer, state_place);
  if (what != InFiles::Nothing) {
    bytes.optimizer_state.outside = state_place.bytes().moved;
    bytes.optimizer_state.in_memory -= bytes.optimizer_state.outside;
  }
  if (what == InFiles::Everything) {
    const ModelFileBytes model_file = model_place.bytes();
    const int64_t window = model_place.window_bytes(), small_gradients = model_file.beside - window;
    bytes.weights.outside = model_file.moved;
    bytes.weights.in_memory += window - model_file.moved;
    bytes.gradients.outside = bytes.gradients.in_memory - small_gradients;
    bytes.gradients.in_memory = small_gradients;
  }
  return bytes;
}

}  // namespace snug::detail
