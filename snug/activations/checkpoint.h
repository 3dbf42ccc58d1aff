#pragma once
// checkpoint: run a part of the forward without keeping its activations; backward computes them again. Memory for time, with gradients
// equal to the bit.
//
//   auto y = snug::checkpoint([block](Tensor h) { return block->forward(h); }, x);
//   auto z = snug::checkpoint({.label = "blocks.3"}, [block](Tensor h, Tensor m) { return block->forward(h, m); }, x, mask);
//
// Capture by value: the callable runs a second time, in backward.

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "snug/activations/checkpoint_frame.h"
#include "snug/activations/policy.h"
#include "snug/activations/training_modes.h"
#include "snug/activations/visit_tensors.h"

namespace snug {

struct CheckpointOptions {
  /// Recompute with the random numbers of the forward (dropout). Costs a copy of the generator (2.5 KB on the CPU, outside of tensor memory)
  /// for each random operator.
  bool preserve_rng_state = true;
  /// The callable draws from the default generators where no operator does: in a function of your own, or by a seed that it sets. The recomputation
  /// then sets the generators back, for as long as such draws may come, and afterwards to where they were; so it is for programs of which no other
  /// thread draws from them during backward. Regions around such a one need it too. Off: the generators are left alone, see checkpoint().
  bool draws_unseen = false;
  /// Stop recomputing as soon as everything backward asked for is there (a region of one small operator is run to its end, which takes less
  /// time than to stop). Off: run every callable to its end, and let surplus saved tensors be an error.
  bool early_stop = true;
  Determinism determinism = Determinism::Metadata;
  /// Names the region in errors.
  std::string label = {};
  /// Which operators' results are kept instead of computed again; none if empty. See policy.h.
  CheckpointPolicy policy = {};
  /// Recomputed in the mode, training or evaluation, that it and its submodules ran in. Needed where `fn` is not itself a
  /// module's holder, and the mode may change between forward and backward.
  std::shared_ptr<torch::nn::Module> module = {};
};

namespace detail {

// A Sequential's operator() has no result that can be deduced; its forward() has.
template <class F, class Arguments>
decltype(auto) run_callable(F& callable, Arguments&& arguments) {
  return std::apply(
      [&callable](auto&&... each) -> decltype(auto) {
        if constexpr (requires { callable.ptr()->is_training(); }) {
          return callable->forward(std::forward<decltype(each)>(each)...);
        } else {
          return callable(std::forward<decltype(each)>(each)...);
        }
      },
      std::forward<Arguments>(arguments));
}

}  // namespace detail

/// Calls `fn(args...)` and returns what it returns. If gradient mode is on, the tensors that autograd would save inside are dropped and
/// recomputed in backward, under the autocast and dispatch state and (by default) the random numbers of the forward. `args` are tensors,
/// containers of them (vector, array, tuple, pair, optional, map) or plain values; tensors among them are kept until backward, and given to
/// an enclosing checkpoint to drop if there is one. Works with retain_graph, nested regions, torch::autograd::grad, create_graph, and modules
/// used several times.
/// Each random operator draws again from a copy of the generator, the default one or one of the program's own, that it drew from. So generators
/// go on as in plain training, and other threads may draw at any time: each number is given out once. Excepted are operators that take no
/// generator (native_dropout, fused attention with dropout on a GPU, other libraries'): while one of these runs again, the default generator is set
/// back, so that another thread's draw just then repeats numbers. Two draws by one operator with operands of one size are told apart by their order.
/// Numbers that a function of your own draws from a default generator, with no operator, are drawn anew in the recomputation, and a seed that `fn`
/// sets is set again, unless draws_unseen is set. Such new numbers are an error for tensors that are saved on the CPU: where a default generator
/// moved during the forward without an operator, their values are compared from there on, as with Determinism::Values. They are no error on a GPU,
/// nor with Determinism::None.
/// `fn` is copied, and called again in backward. If it is the holder of a module, such as a torch::nn::Sequential, this one and its
/// submodules are in the mode, training or evaluation, that they were in in forward; for other callables name it in CheckpointOptions.
/// The recomputation changes no tensor that was there before: what the forward wrote to such memory (BatchNorm's running statistics, a
/// counter), by LibTorch's operators, is copied before it is written, its storage as a whole, and the recomputation works on those copies.
/// So many regions that each write a part of one large buffer keep it as many times; give them a buffer each. Other side effects happen
/// twice. Memory from outside that it only reads is read again: keep what `fn` captures as it is until backward, as what autograd saves.
/// TorchScript functions that are not optimised yet run as they are, operator by operator.
/// Throws ConfigError, naming the label, if `fn` wrote in place to one of the tensors in `args`, or with a gradient to one that it
/// captured, or to a sparse one from outside. Backward throws snug::Error, naming label, operator and its place in the sequence, if the
/// recomputation differs from the forward, and c10::Error, as LibTorch does for a saved tensor, if it comes to read memory from outside that
/// was written since.
/// Algorithm: torch/utils/checkpoint.py, non-reentrant form (torch 2.13.0), with what is said of memory and modes on top.
template <class F, class... Args>
auto checkpoint(CheckpointOptions options, F&& fn, Args&&... args) {
  using Arguments = std::tuple<std::decay_t<Args>...>;
  Arguments arguments(std::forward<Args>(args)...);
  auto shared_fn = std::make_shared<std::decay_t<F>>(std::forward<F>(fn));
  if (!c10::GradMode::is_enabled()) {
    return detail::run_callable(*shared_fn, std::move(arguments));
  }
  Arguments without_tensors = arguments;
  std::vector<at::Tensor> inputs;
  detail::visit_tensors(without_tensors, [&](at::Tensor& tensor) { inputs.push_back(std::exchange(tensor, {})); });
  detail::CheckpointForward forward(
      {options.preserve_rng_state, options.draws_unseen, options.early_stop, options.determinism,
       std::move(options.label), std::move(options.policy)},
      std::move(inputs),
      [shared_fn, without_tensors,
       modes = detail::TrainingModes(options.module ? options.module : detail::module_of(*shared_fn))](
          const std::vector<at::Tensor>& saved) {
        const detail::TrainingModes::Scope scope(modes);
        Arguments again = without_tensors;
        auto next = saved.begin();
        detail::visit_tensors(again, [&](at::Tensor& tensor) { tensor = *next++; });
        detail::run_callable(*shared_fn, std::move(again));
      });
  if constexpr (std::is_void_v<decltype(detail::run_callable(*shared_fn, std::move(arguments)))>) {
    detail::run_callable(*shared_fn, std::move(arguments));
    forward.finish();
  } else {
    auto result = detail::run_callable(*shared_fn, std::move(arguments));
    forward.finish();
    return result;
  }
}

template <class F, class... Args>
  requires(!std::is_same_v<std::decay_t<F>, CheckpointOptions>)
auto checkpoint(F&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions{}, std::forward<F>(fn), std::forward<Args>(args)...);
}

}  // namespace snug
