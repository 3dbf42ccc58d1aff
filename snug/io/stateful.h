#pragma once
// stateful(x): the Stateful of modules, optimizers and whatever has state_dict() and
// load_state_dict(), for SnapshotStore. It refers to x, which must outlive it.
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

/// Parameters and buffers under their names in the module. What is registered under several names
/// (tied weights) is kept once, under the first. Loading copies in place, so optimizers keep
/// hold of the same tensors. It throws CorruptFile, and has changed nothing, if a name is missing
/// or unknown, or if a shape or dtype differs; the message names the parameter.
Stateful stateful(torch::nn::Module& module);

/// A StatefulOptimizer's own state_dict, of all other optimizers the archive torch itself saves,
/// as one uint8 tensor "archive": learning rates included; loads in C++ only; not the same bytes
/// in every process, as torch writes addresses into it. Taking the state throws ConfigError if torch
/// cannot save it, as happens to LBFGS in the middle of its work. Loading throws CorruptFile, and
/// has changed nothing, if the state is another kind of optimizer's or of parameters of other sizes.
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
