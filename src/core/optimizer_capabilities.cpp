#include "src/core/optimizer_capabilities.h"

#include <algorithm>
#include <optional>
#include <typeinfo>
#include <variant>

#include <c10/util/Type.h>
#include <torch/optim.h>

#include "src/core/allocated_bytes.h"
#include "src/core/joined_optimizers.h"

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

std::vector<const optim::Optimizer*> all_of(const optim::Optimizer& optimizer) {
  const std::vector<optim::Optimizer*> all = optimizers_in(const_cast<optim::Optimizer&>(optimizer));
  return {all.begin(), all.end()};
}

void collect(const StateDict& state, std::vector<at::Tensor>& tensors) {
  for (const StateDict::Entry& entry : state.entries()) {
    if (const auto* tensor = std::get_if<at::Tensor>(&entry.value)) {
      tensors.push_back(*tensor);
    } else if (const auto* inner = std::get_if<StateDict>(&entry.value)) {
      collect(*inner, tensors);
    }
  }
}

// Each of torch's optimizers keeps its tensors in a type of its own, and torch has no common way to list the tensors.
void collect(torch::optim::OptimizerParamState& state, std::vector<at::Tensor>& tensors) {
  using namespace optim;
  if (auto* sgd = dynamic_cast<SGDParamState*>(&state)) {
    tensors.push_back(sgd->momentum_buffer());
  } else if (auto* adam = dynamic_cast<AdamParamState*>(&state)) {
    tensors.insert(tensors.end(), {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()});
  } else if (auto* adamw = dynamic_cast<AdamWParamState*>(&state)) {
    tensors.insert(tensors.end(), {adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq()});
  } else if (auto* rms = dynamic_cast<RMSpropParamState*>(&state)) {
    tensors.insert(tensors.end(), {rms->square_avg(), rms->momentum_buffer(), rms->grad_avg()});
  } else if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state)) {
    tensors.push_back(adagrad->sum());
  } else if (auto* lbfgs = dynamic_cast<LBFGSParamState*>(&state)) {
    tensors.insert(tensors.end(), {lbfgs->d(), lbfgs->H_diag(), lbfgs->prev_flat_grad()});
    for (const auto* history : {&lbfgs->old_dirs(), &lbfgs->old_stps()}) {
      tensors.insert(tensors.end(), history->begin(), history->end());
    }
  }
}

}  // namespace

OptimizerCapabilities capabilities_of(optim::Optimizer& optimizer) {
  static UpdateAware no_promise;
  auto* update = dynamic_cast<UpdateAware*>(&optimizer);
  return {.scaling = dynamic_cast<GradientScalingAware*>(&optimizer),
          .state = dynamic_cast<StatefulOptimizer*>(&optimizer),
          .update = update != nullptr ? *update : no_promise,
          .movable_state = dynamic_cast<MovableState*>(&optimizer)};
}

std::vector<optim::Optimizer*> optimizers_in(optim::Optimizer& optimizer) {
  const auto* joined = dynamic_cast<const JoinedOptimizers*>(&optimizer);
  return joined != nullptr ? joined->optimizers() : std::vector{&optimizer};
}

void take_groups(optim::Optimizer& optimizer) {
  if (auto* joined = dynamic_cast<JoinedOptimizers*>(&optimizer)) {
    joined->take_groups();
  }
}

std::string kind_of(const optim::Optimizer& optimizer) {
  std::string kinds;
  for (const optim::Optimizer* one : all_of(optimizer)) {
    kinds += (kinds.empty() ? "" : ", ") + c10::demangle(typeid(*one).name());
  }
  return kinds;
}

std::vector<at::Tensor> tensors_in(const StateDict& state) {
  std::vector<at::Tensor> tensors;
  collect(state, tensors);
  return tensors;
}

std::vector<at::Tensor> state_tensors(const optim::Optimizer& optimizer) {
  std::vector<at::Tensor> tensors;
  if (dynamic_cast<const JoinedOptimizers*>(&optimizer) != nullptr) {
    for (const optim::Optimizer* one : all_of(optimizer)) {
      const std::vector<at::Tensor> of_one = state_tensors(*one);
      tensors.insert(tensors.end(), of_one.begin(), of_one.end());
    }
    return tensors;
  }
  if (const auto* aware = dynamic_cast<const MemoryAware*>(&optimizer)) {
    return aware->state_tensors();
  }
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return tensors_in(stateful->state_dict());
  }
  for (const auto& [parameter, state] : optimizer.state()) {
    collect(*state, tensors);
  }
  return tensors;
}

int64_t workspace_bytes(const optim::Optimizer& optimizer) {
  if (const auto* joined = dynamic_cast<const JoinedOptimizers*>(&optimizer)) {
    int64_t sum = 0, largest = 0;
    for (const optim::Optimizer* one : joined->early()) {
      sum += workspace_bytes(*one);
    }
    for (const optim::Optimizer* one : joined->late()) {
      largest = std::max(largest, workspace_bytes(*one));
    }
    return sum + largest;
  }
  if (const auto* aware = dynamic_cast<const MemoryAware*>(&optimizer)) {
    return aware->workspace_bytes();
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
  return std::ranges::all_of(all_of(optimizer), [](const optim::Optimizer* one) {
    return dynamic_cast<const MemoryAware*>(one) != nullptr || is_torchs(*one);
  });
}

bool needs_closure(const optim::Optimizer& optimizer) {
  return std::ranges::any_of(
      all_of(optimizer), [](const optim::Optimizer* one) { return dynamic_cast<const optim::LBFGS*>(one) != nullptr; });
}

int64_t state_bytes_to_come(const optim::Optimizer& optimizer,
                            const std::function<bool(const at::Tensor&)>& gets_gradient) {
  if (const auto* aware = dynamic_cast<const MemoryAware*>(&optimizer)) {
    return aware->state_bytes_to_come_of(gets_gradient);
  }
  int64_t bytes = 0;
  if (dynamic_cast<const JoinedOptimizers*>(&optimizer) != nullptr) {
    for (const optim::Optimizer* one : all_of(optimizer)) {
      bytes += state_bytes_to_come(*one, gets_gradient);
    }
    return bytes;
  }
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

}  // namespace snug::detail
