#pragma once
// checkpoint: runs a part of the forward without keeping its activations. Backward computes them again. This trades
// time for memory; gradients are equal to the bit.
//
//   auto y = snug::checkpoint([block](Tensor h) { return block->forward(h); }, x);
//   auto z = snug::checkpoint({.label = "blocks.3"},
//                             [block](Tensor h, Tensor m) { return block->forward(h, m); }, x, mask);
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

#include "snug/activations/policy.h"
#include "snug/activations/visit_tensors.h"

namespace torch::nn {
class Module;
}

namespace snug {

/// How the recomputation is compared with the forward.
enum class Determinism {
  None,      ///< only the number of saved tensors
  Metadata,  ///< and shape, dtype and device of each, and by which operators of what it was made
  Values,    ///< and the bits of each, by a hash: reads every saved tensor twice
};

struct CheckpointOptions {
  /// Recompute with the random numbers of the forward (dropout). Costs a copy of the generator (2.5 KB on the CPU,
  /// outside of tensor memory) for each random operator.
  bool preserve_rng_state = true;
  /// Set it if the callable draws from the default generators outside of operators: in a function of your own, or from
  /// a seed that it sets. While such draws may come, the recomputation sets the generators back to their states in the
  /// forward; afterwards it restores them. It is therefore only for programs in which no other thread draws from these
  /// generators during backward. Regions around such a region need it too. Off: the generators are left alone, see
  /// checkpoint().
  bool draws_unseen = false;
  /// Stop recomputing as soon as all tensors that backward asked for are there. A region of one small operator is run
  /// to its end, which is faster than stopping. Off: run every callable to its end; surplus saved tensors are then an
  /// error.
  bool early_stop = true;
  Determinism determinism = Determinism::Metadata;
  /// Names the region in errors.
  std::string label = {};
  /// The operators whose results are kept instead of computed again; none if empty. See policy.h.
  CheckpointPolicy policy = {};
  /// The module whose mode (training or evaluation), and whose submodules' modes, the recomputation takes from the
  /// forward. Needed if `fn` is not itself the holder of a module and the mode may change between forward and backward.
  std::shared_ptr<torch::nn::Module> module = {};
};

namespace detail {

/// While it lives, tensors saved on this thread are dropped; `recompute(inputs)` brings them back in backward.
class [[nodiscard]] CheckpointForward final {
 public:
  CheckpointForward(CheckpointOptions options, std::vector<at::Tensor> inputs,
                    std::function<void(const std::vector<at::Tensor>&)> recompute);
  ~CheckpointForward();
  /// Call it at the end of the forward. Throws ConfigError if the forward wrote to one of `inputs`.
  void finish();
  CheckpointForward(const CheckpointForward&) = delete;
  CheckpointForward& operator=(const CheckpointForward&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// The module of a callable that is a module's holder, such as a torch::nn::Sequential; otherwise null.
template <class F>
std::shared_ptr<torch::nn::Module> module_of(const F& callable) {
  if constexpr (requires { callable.ptr(); }) {
    if constexpr (std::is_convertible_v<decltype(callable.ptr()), std::shared_ptr<torch::nn::Module>>) {
      return callable.ptr();
    }
  }
  return nullptr;
}

// The result type of a Sequential's operator() cannot be deduced; that of its forward() can.
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

/// Calls `fn(args...)` and returns its result. If gradient mode is on, the tensors that autograd would save inside are
/// dropped, and recomputed in backward under the autocast and dispatch state and (by default) with the random numbers
/// of the forward. `args` are tensors, containers of them (vector, array, tuple, pair, optional, map) or plain values.
/// Tensors among them are kept until backward; inside another checkpoint they are given to that one to drop. Works with
/// retain_graph, nested regions, torch::autograd::grad, create_graph, and modules used several times.
/// Random numbers of operators: each random operator draws again from a copy of the generator that it drew from, the
/// default one or one of the program's own. Generators therefore go on as in plain training, and other threads may draw
/// at any time: each number is given out once. Exceptions:
/// - Operators that take no generator (native_dropout, fused attention with dropout on a GPU, operators of other
///   libraries): while one of these runs again, the default generator is set back, so that another thread's draw at
///   that moment repeats numbers.
/// - Recurrent layers of cuDNN with dropout draw from a state of cuDNN's own, and so draw anew in the recomputation:
///   their gradients are then not those of the loss. Leave them out of regions, or put dropout between layers.
/// - Two draws by one operator with operands of the same sizes are told apart only by their order.
/// Random numbers of other code: numbers that a function of your own draws from a default generator without an operator
/// are drawn anew in the recomputation, and a seed that `fn` sets is set again, unless draws_unseen is set. If such new
/// numbers reach tensors that are saved on the CPU, this is an error: once a default generator has moved during the
/// forward without an operator, the values of these tensors are compared, as with Determinism::Values. It is no error
/// on a GPU, nor with Determinism::None.
/// `fn` is copied, and called again in backward. If it is the holder of a module, such as a torch::nn::Sequential, the
/// recomputation runs with the module and its submodules in the modes (training or evaluation) that they had in the
/// forward. For other callables, name the module in CheckpointOptions.
/// The recomputation changes no tensor that existed before the region. If LibTorch's operators write to such memory in
/// the forward (BatchNorm's running statistics, a counter), its whole storage is copied before the write, and the
/// recomputation works on copies. Many regions that each write a part of one large buffer therefore keep it many times;
/// give each of them a buffer of its own. Other side effects happen twice. Memory from outside that `fn` only reads is
/// read again: do not change captured tensors until backward, just like tensors that autograd saves. TorchScript
/// functions that are not optimised yet run unoptimised, operator by operator.
/// Forward-mode AD: the tangents of tensors in `args` are kept until backward, too, and the recomputation has them
/// again. LibTorch forgets a captured tensor's tangent when its level ends: pass such a tensor as an argument. The
/// recomputation enters a level of its own, of which LibTorch allows one for the process, so no other thread may be in
/// one meanwhile.
/// Throws ConfigError, naming the label, if `fn` wrote in place to one of the tensors in `args`, or with a gradient to
/// a tensor that it captured, or to a tensor from outside that has no memory of its own (a sparse one, or a wrapper of
/// others). Backward throws snug::Error, naming label, operator and its place in the sequence, if the recomputation
/// differs from the forward. It throws c10::Error, as LibTorch does for a saved tensor, if the recomputation reads
/// memory from outside that was written since. Algorithm: torch/utils/checkpoint.py, non-reentrant form (torch 2.13.0),
/// plus the handling of memory and module modes described above.
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
  if (options.module == nullptr) {
    options.module = detail::module_of(*shared_fn);
  }
  detail::CheckpointForward forward(std::move(options), std::move(inputs),
                                    [shared_fn, without_tensors](const std::vector<at::Tensor>& saved) {
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
