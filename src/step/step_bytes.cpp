#include "src/step/step_bytes.h"

#include <algorithm>
#include <optional>

#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "snug/stateful_optimizer.h"
#include "src/core/allocated_bytes.h"
#include "src/memory/backward_pass.h"
#include "src/memory/optimizer_tensors.h"

namespace snug::detail {
namespace {

namespace optim = torch::optim;

// Tensors of a parameter's size that one of torch's optimizers allocates to update the parameter.
struct TensorsTaken {
  int64_t kept;       // as state, by the first update
  int64_t workspace;  // at once, beside the state, and freed again
};

// torch's optimizers go parameter by parameter. A weight decay that is added to the gradient makes another gradient.
// Nothing: the options are not torch's.
std::optional<TensorsTaken> tensors_taken(const optim::OptimizerOptions& options) {
  const auto with_decay = [](double decay, TensorsTaken taken) {
    taken.workspace += decay != 0 ? 1 : 0;
    return taken;
  };
  if (const auto* adam = dynamic_cast<const optim::AdamOptions*>(&options)) {
    return with_decay(adam->weight_decay(), {.kept = adam->amsgrad() ? 3 : 2, .workspace = 2});
  }
  if (const auto* adamw = dynamic_cast<const optim::AdamWOptions*>(&options)) {
    return TensorsTaken{.kept = adamw->amsgrad() ? 3 : 2, .workspace = 2};
  }
  if (const auto* rmsprop = dynamic_cast<const optim::RMSpropOptions*>(&options)) {
    const int64_t kept = 1 + (rmsprop->momentum() > 0 ? 1 : 0) + (rmsprop->centered() ? 1 : 0);
    return with_decay(rmsprop->weight_decay(), {.kept = kept, .workspace = 1});
  }
  if (const auto* sgd = dynamic_cast<const optim::SGDOptions*>(&options)) {
    const bool has_momentum = sgd->momentum() != 0;
    return with_decay(sgd->weight_decay(),
                      {.kept = has_momentum ? 1 : 0, .workspace = has_momentum && sgd->nesterov() ? 1 : 0});
  }
  if (const auto* adagrad = dynamic_cast<const optim::AdagradOptions*>(&options)) {  // Adagrad is made with its state
    return with_decay(adagrad->weight_decay(), {.kept = 0, .workspace = 1});
  }
  return std::nullopt;
}

// An optimizer that has torch's options, and is not torch's, may keep anything, or hand gradients on to others.
bool is_torchs(const optim::Optimizer& optimizer) {
  const auto is_a = [&]<class... Kinds>() { return (... || (dynamic_cast<const Kinds*>(&optimizer) != nullptr)); };
  return is_a.operator()<optim::Adam, optim::AdamW, optim::RMSprop, optim::SGD, optim::Adagrad>();
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
int64_t state_bytes(const torch::optim::Optimizer& optimizer, const StatePlace& place) {
  if (place.bytes().moved > 0) {
    return place.bytes().moved;
  }
  AllocatedBytes bytes;
  for (const at::Tensor& tensor : state_tensors(optimizer)) {
    bytes.add(tensor);
  }
  return bytes.count() + state_bytes_to_come(optimizer);
}

}  // namespace

int64_t workspace_bytes(const optim::Optimizer& optimizer) {
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return stateful->workspace_bytes();
  }
  constexpr TensorsTaken kUnknown{.kept = 0, .workspace = 3};
  constexpr int64_t kNumbers = 64;  // for numbers that operators turn into tensors
  int64_t most = 0;
  for (const auto& group : optimizer.param_groups()) {
    const int64_t tensors = tensors_taken(group.options()).value_or(kUnknown).workspace;
    for (const at::Tensor& parameter : group.params()) {
      most = std::max(most, tensors * allocated_bytes(parameter));
    }
  }
  return most + kNumbers;
}

bool knows_state_to_come(const optim::Optimizer& optimizer) {
  const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer);
  return stateful != nullptr ? stateful->knows_state_to_come() : is_torchs(optimizer);
}

int64_t state_bytes_to_come(const optim::Optimizer& optimizer,
                            const std::function<bool(const at::Tensor&)>& gets_gradient) {
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return stateful->state_bytes_to_come_of(gets_gradient);
  }
  int64_t bytes = 0;
  const bool is_known = is_torchs(optimizer);
  for (const auto& group : optimizer.param_groups()) {
    const auto taken = tensors_taken(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (is_known && taken && optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0 &&
          gets_gradient(parameter)) {
        bytes += taken->kept * allocated_bytes(parameter);
      }
    }
  }
  return bytes;
}

StateToCome::StateToCome(const optim::Optimizer& optimizer, const TrainedParameters& parameters)
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
  bytes.optimizer_state.in_memory = state_bytes(optimizer, state_place);
  if (placement.state == Place::File) {
    bytes.optimizer_state.outside = state_place.bytes().moved;
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
