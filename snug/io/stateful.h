#pragma once
// stateful(x): the Stateful of modules, optimizers and all objects with state_dict() and load_state_dict(), for
// SnapshotStore. It refers to x, which must outlive it.
//
//   snapshots.save(step, {{"model", snug::stateful(model)}, {"optimizer", snug::stateful(adam)}});

#include <concepts>

#include "snug/core/state.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

/// Parameters and buffers under their names in the module. A tensor that is registered under several names (tied
/// weights) is stored once, under the first. Loading copies in place, so optimizers keep the same tensors. It throws
/// CorruptFile, and has changed nothing, if a name is missing or unknown, or if a shape or dtype differs; the message
/// names the parameter.
Stateful stateful(torch::nn::Module& module);

/// For a StatefulOptimizer, its own state_dict. For all other optimizers, the archive that torch itself saves, as one
/// uint8 tensor "archive". The archive includes the learning rates, loads only in C++, and does not have the same bytes
/// in every process, because torch writes addresses into it. Taking the state throws ConfigError if torch cannot save
/// it, as happens to LBFGS in the middle of its work. Loading throws CorruptFile, and has changed nothing, if the state
/// belongs to another kind of optimizer or to parameters of other sizes.
Stateful stateful(torch::optim::Optimizer& optimizer);

/// GradScaler, EMA, your own types.
template <class T>
  requires requires(T& object, const T& constant, const StateDict& state) {
    { constant.state_dict() } -> std::convertible_to<StateDict>;
    object.load_state_dict(state);
  }
Stateful stateful(T& object) {
  return {[&object] { return StateDict(object.state_dict()); },
          [&object](const StateDict& state) { object.load_state_dict(state); }};
}

/// Module holders such as torch::nn::Linear and snug::Gpt, and shared pointers to modules.
template <class Holder>
  requires requires(Holder& holder) {
    { *holder } -> std::convertible_to<torch::nn::Module&>;
  }
Stateful stateful(Holder& holder) {
  return stateful(static_cast<torch::nn::Module&>(*holder));
}

}  // namespace snug
