#pragma once
// Selective checkpointing: the operators whose results a checkpointed region keeps. Its recomputation takes these
// results instead of running the operators again. Matrix products are most of the time and few of the bytes; keeping
// them makes recomputation nearly free.
//
//   auto y = snug::checkpoint({.policy = snug::save_matmuls}, block, x);
//   auto z = snug::checkpoint({.policy = snug::policy_of({{"aten::exp", snug::Keep::Save}})}, block, x);
//
// visit_tensors(value, f): calls f(Tensor&) for every tensor inside nested standard containers, in a fixed order. Other
// values are skipped.
//
// checkpoint: runs a part of the forward without keeping its activations. Backward computes them again. This trades
// time for memory; gradients are equal to the bit.
//
//   auto y = snug::checkpoint([block](Tensor h) { return block->forward(h); }, x);
//   auto z = snug::checkpoint({.label = "blocks.3"},
//                             [block](Tensor h, Tensor m) { return block->forward(h, m); }, x, mask);
//
// Capture by value: the callable runs a second time, in backward.
//
// checkpoint_sequential: a chain of layers in segments, each of which keeps only its input.
//
//   Tensor y = snug::checkpoint_sequential(model, 4, x);   // 4 segments; the last runs plain, as in Python
//   Tensor z = snug::checkpoint_sequential(model, 0, x);   // about sqrt(n) of n layers
//
// sliced: runs a part of the forward on one slice of its input after the other, each checkpointed. For a single sample
// whose first layers do not fit into memory: a picture of a gigapixel, a cloud of ten million points. Only one slice's
// activations are alive at a time.
//
//   // points: [1, 10'000'000, 3]. Each point by itself, then the largest of each feature in a slice: [1, slices, 256].
//   auto each = [this](Tensor points) { return torch::amax(features->forward(points), 1, /*keepdim=*/true); };
//   Tensor cloud = torch::amax(snug::sliced(each, points, {.dim = 1}), 1);

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

namespace snug {

/// The treatment of an operator's result in a checkpointed region.
enum class Keep {
  Recompute,  ///< dropped; run again when backward needs it
  Save,       ///< kept until the region's backward is done
  Offload,    ///< kept as SaveOnHost keeps it, with its default options
};

/// Asked for each operator of the forward, by its name without overload, such as "aten::mm". Operators are those below
/// autograd: a linear layer is aten::addmm, or aten::mm and aten::add_; attention is one operator, with a different
/// name on each device. Views, results of in-place operators and casts are always recomputed, whatever the policy says.
using CheckpointPolicy = std::function<Keep(std::string_view operator_name)>;

/// Saves matrix products and convolutions.
Keep save_matmuls(std::string_view operator_name);
/// Saves fused attention (aten::scaled_dot_product_attention's operators).
Keep save_attention(std::string_view operator_name);
/// Saves all results but those of elementwise operators, norms, softmax and copies, which are cheap to run again.
Keep recompute_pointwise(std::string_view operator_name);

/// The policy that `names` give, and Keep::Recompute for all other operators. Throws ConfigError for a name that no
/// operator of LibTorch has.
CheckpointPolicy policy_of(std::map<std::string, Keep> names);

}  // namespace snug

namespace snug::detail {

template <class T>
concept TupleLike = requires { std::tuple_size<T>::value; } && !std::ranges::range<T>;

template <class T>
concept OptionalLike = requires(T& value) {
  value.has_value();
  *value;
};

template <class T>
concept MapLike = requires { typename T::mapped_type; };

// A view shows elements that something else owns. It is recognised by elements that can be written although the view
// itself is const.
template <class T>
concept ViewLike = std::ranges::range<T> && !std::is_arithmetic_v<std::ranges::range_value_t<T>> &&
                   (std::ranges::view<T> || requires(const T& range) {
                     { *std::ranges::begin(range) } -> std::same_as<std::ranges::range_value_t<T>&>;
                   });

template <class T, class F>
void visit_tensors(T& value, F&& f) {
  static_assert(
      !std::is_same_v<T, const at::Tensor> && !ViewLike<T>,
      "a view such as at::TensorList or std::span does not keep its tensors until backward; pass a std::vector");
  if constexpr (std::is_same_v<T, at::Tensor>) {
    f(value);
  } else if constexpr (OptionalLike<T>) {
    if (value.has_value()) {
      visit_tensors(*value, f);
    }
  } else if constexpr (TupleLike<T>) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, f), ...); }, value);
  } else if constexpr (MapLike<T>) {
    for (auto& entry : value) {
      visit_tensors(entry.second, f);
    }
  } else if constexpr (std::ranges::range<T> && !std::is_same_v<T, std::string>) {
    if constexpr (std::is_lvalue_reference_v<std::ranges::range_reference_t<T>>) {
      for (auto& element : value) {
        visit_tensors(element, f);
      }
    }
  }
}

}  // namespace snug::detail

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

namespace torch::nn {
class Sequential;
}

namespace snug {

/// Treatment of the last segment. Backward begins with it, so recomputing it saves memory only while the others run
/// forward.
enum class LastSegment {
  Plain,      ///< Python's rule: keep its activations
  Recompute,  ///< checkpoint it like the others
};

/// Runs `layers` one after the other on `input`. With n layers, each of the first `segments` - 1 segments has n /
/// segments layers (rounded down) and is checkpointed; the last has the rest. As in torch/utils/checkpoint.py.
///
/// With `segments` = 0 there are about sqrt(n) segments, which is near the least peak if all layers save about as much.
/// If layers differ, or a certain number of bytes must be kept, plan_activations() chooses better
/// (include/snug/plan.h). Throws ConfigError unless 0 <= segments <= n and n > 0.
at::Tensor checkpoint_sequential(const std::vector<std::function<at::Tensor(at::Tensor)>>& layers, int64_t segments,
                                 at::Tensor input, LastSegment last = LastSegment::Plain);

/// The same for the modules of a Sequential, each of which must take one tensor and return one.
at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input,
                                 LastSegment last = LastSegment::Plain);

struct SlicedOptions {
  /// The dimension along which the input is cut and the results are joined. Counted from the end if negative.
  int64_t dim = 0;
  /// Number of slices, at most the length of `dim`. 0: the number that the plan of a Stepper with a memory_budget asks
  /// for, or 1 outside of one.
  int64_t slices = 0;
  /// The length of every slice but the last is a multiple of this: for layers that take, say, groups of four points.
  int64_t multiple = 1;
  /// Options for the checkpoint of each slice.
  CheckpointOptions checkpoint = {};
};

/// Cuts `input` along `dim` into slices of equal length (the last may be shorter), calls `fn` on each as
/// snug::checkpoint does, and returns the results, concatenated along `dim`. With one slice it is a plain `fn(input)`.
/// - Suitable: an `fn` that treats the places along `dim` independently (linear layers, pointwise ones, norms of
///   features), or one that returns a sum or a maximum over them with length 1 along `dim`, if the caller then takes
///   the sum or the maximum of the result.
/// - Not suitable: layers that look across `dim` (convolutions along it, attention, BatchNorm's statistics).
/// - The result is then that of `fn(input)`, up to the rounding of sums. Gradients of parameters are sums over the
///   slices, so they differ by the rounding of a sum in another order, and, for a maximum that occurs several times, by
///   the way in which LibTorch shares its gradient out.
/// - Random layers draw slice after slice, so their numbers differ from those for the whole input.
/// - Inside another `sliced` whose number of slices is left to a plan, give the inner one a number of its own.
/// Throws ConfigError if the input has no dimension `dim`, if slices < 0 or multiple < 1, or if a result has no such
/// dimension.
at::Tensor sliced(const std::function<at::Tensor(at::Tensor)>& fn, const at::Tensor& input, SlicedOptions options = {});

}  // namespace snug
