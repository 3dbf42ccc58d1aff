#pragma once
// checkpoint: runs a part of the forward without keeping its activations. Backward computes the activations again. A
// region trades time for memory; gradients are equal to the bit.
//
//   auto y = snug::checkpoint([block](Tensor h) { return block->forward(h); }, x);
//   auto z = snug::checkpoint({.label = "blocks.3"},
//                             [block](Tensor h, Tensor m) { return block->forward(h, m); }, x, mask);
//
// Capture by value: the callable runs a second time, in backward.
//
// A policy (selective checkpointing) chooses operators whose results the region keeps. The recomputation takes the kept
// results instead of running the operators again. Matrix products take most of the time and make few of the bytes, so
// keeping their results makes recomputation nearly free.
//
//   auto y = snug::checkpoint({.policy = snug::save_matmuls}, block, x);
//   auto z = snug::checkpoint({.policy = snug::policy_of({{"aten::exp", snug::Keep::Save}})}, block, x);
//
// checkpoint_sequential: a chain of layers in segments, each of which keeps only its input.
//
//   Tensor y = snug::checkpoint_sequential(model, 4, x);   // 4 segments; the last runs plain, as in Python
//   Tensor z = snug::checkpoint_sequential(model, 0, x);   // about sqrt(n) of n layers
//
// sliced: runs a part of the forward on slice after slice of its input, each slice checkpointed. Only the activations
// of a single slice are alive at a time. For a sample whose first layers do not fit into memory: a picture of a
// gigapixel, a cloud of ten million points.
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
  Recompute,  ///< dropped; the operator runs again when backward needs the result
  Save,       ///< kept until the region's backward is done
  Offload,    ///< kept as SaveOnHost with default options keeps a tensor
};

/// Chooses the treatment of each operator's result in the forward. The argument is the operator's name without
/// overload, such as "aten::mm". The policy sees the operators below autograd: a linear layer is aten::addmm, or
/// aten::mm and aten::add_; attention is a single operator, with a different name on each device. Views, results of
/// in-place operators and casts are always recomputed, whatever the policy says.
using CheckpointPolicy = std::function<Keep(std::string_view operator_name)>;

/// Saves matrix products and convolutions.
Keep save_matmuls(std::string_view operator_name);
/// Saves fused attention (aten::scaled_dot_product_attention's operators).
Keep save_attention(std::string_view operator_name);
/// Saves all results except results of elementwise operators, norms, softmax and copies, which are cheap to run again.
Keep recompute_pointwise(std::string_view operator_name);

/// A policy with the treatments in `names`, and Keep::Recompute for all other operators. Throws ConfigError if LibTorch
/// has no operator of a given name.
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

// A view shows elements of another owner. The elements of a view can be written although the view is const, and by this
// sign a view is recognised.
template <class T>
concept ViewLike = std::ranges::range<T> && !std::is_arithmetic_v<std::ranges::range_value_t<T>> &&
                   (std::ranges::view<T> || requires(const T& range) {
                     { *std::ranges::begin(range) } -> std::same_as<std::ranges::range_value_t<T>&>;
                   });

// Calls f(Tensor&) for every tensor inside nested standard containers, in a fixed order. Other values are skipped.
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

/// The comparison of the recomputation with the forward.
enum class Determinism {
  None,      ///< only the number of saved tensors
  Metadata,  ///< also shape, dtype and device of each saved tensor, and the operators and operands that made the tensor
  Values,    ///< also the bits of each saved tensor, by a hash: reads every saved tensor twice
};

struct CheckpointOptions {
  /// Recompute with the random numbers of the forward (dropout). Costs a copy of the generator (2.5 KB on the CPU,
  /// outside of tensor memory) for each random operator.
  bool preserve_rng_state = true;
  /// Set this option if the callable draws from the default generators outside of operators: in a function of your own,
  /// or from a seed that the callable sets. While draws outside of operators may come, the recomputation sets the
  /// generators back to their states in the forward; afterwards the recomputation restores the generators. The option
  /// is therefore only for programs in which no other thread draws from the default generators during backward. Regions
  /// around a region with this option need the option too. Off: the generators are left alone, see checkpoint().
  bool draws_unseen = false;
  /// Stop the recomputation as soon as all tensors that backward asked for are recomputed. A region of a single small
  /// operator runs to its end, because stopping takes longer. Off: run every callable to its end; surplus saved tensors
  /// are then an error.
  bool early_stop = true;
  Determinism determinism = Determinism::Metadata;
  /// Names the region in errors.
  std::string label = {};
  /// Chooses the operators whose results are kept instead of computed again; an empty policy chooses no operator.
  CheckpointPolicy policy = {};
  /// The recomputation runs with this module and its submodules in the modes (training or evaluation) of the forward.
  /// Needed if `fn` is not itself the holder of a module and the mode may change between forward and backward.
  std::shared_ptr<torch::nn::Module> module = {};
};

namespace detail {

/// During the lifetime of the object, tensors saved on this thread are dropped. In backward `recompute(inputs)` brings
/// the tensors back.
class [[nodiscard]] CheckpointForward final {
 public:
  CheckpointForward(CheckpointOptions options, std::vector<at::Tensor> inputs,
                    std::function<void(const std::vector<at::Tensor>&)> recompute);
  ~CheckpointForward();
  /// Ends the forward. Throws ConfigError if the forward wrote to a tensor of `inputs`, with a gradient to a captured
  /// tensor, or to a tensor from outside without memory of its own.
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

// The result type of a Sequential's operator() cannot be deduced; the result type of its forward() can.
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

/// Calls `fn(args...)` and returns the result. If gradient mode is on, the tensors that autograd would save inside are
/// dropped, and recomputed in backward under the autocast and dispatch state and (by default) with the random numbers
/// of the forward. `args` are tensors, containers of tensors (vector, array, tuple, pair, optional, map) or plain
/// values. Tensors among `args` are kept until backward; inside another checkpoint, the outer checkpoint drops these
/// tensors. Works with retain_graph, nested regions, torch::autograd::grad, create_graph, and modules used several
/// times.
///
/// Random numbers of operators: each random operator draws again from a copy of the generator of its first draw, a
/// default generator or a generator of the program. Generators therefore go on as in plain training, and other threads
/// may draw at any time: each number is given out once. Exceptions:
/// - Operators that take no generator (native_dropout, fused attention with dropout on a GPU, operators of other
///   libraries): while such an operator runs again, the default generator is set back, so another thread's draw at that
///   moment repeats numbers.
/// - Recurrent layers of cuDNN with dropout draw from a state of cuDNN, so the recomputation draws other numbers, and
///   the gradients do not belong to the loss. Leave such layers out of regions, or put dropout between layers.
/// - Two draws by one operator with operands of the same sizes are told apart only by their order.
///
/// Random numbers of other code: unless draws_unseen is set, a function of your own that draws from a default generator
/// without an operator draws other numbers in the recomputation, and a seed that `fn` sets is set again. Other numbers
/// in tensors that are saved on the CPU are an error: once a default generator has moved during the forward without an
/// operator, the values of tensors saved on the CPU are compared, as with Determinism::Values. Nothing is compared on a
/// GPU, nor with Determinism::None.
///
/// `fn` is copied, and called again in backward. If `fn` is the holder of a module, such as a torch::nn::Sequential,
/// the recomputation runs with the module and its submodules in the modes (training or evaluation) of the forward. For
/// other callables, name the module in CheckpointOptions.
///
/// The recomputation changes no tensor that existed before the region. If LibTorch's operators write to older memory in
/// the forward (BatchNorm's running statistics, a counter), the whole storage is copied before the write, and the
/// recomputation works on copies. Many regions that each write a part of one large buffer therefore keep the buffer
/// many times; give each region a buffer of its own. Other side effects happen twice. Memory from outside that `fn`
/// only reads is read again: do not change captured tensors until backward, just like tensors that autograd saves.
/// TorchScript functions that are not optimised yet run unoptimised, operator by operator.
///
/// Forward-mode AD: the tangents of tensors in `args` are also kept until backward, and the recomputation gets the
/// tangents again. LibTorch forgets a captured tensor's tangent when its level ends: pass a tensor with a tangent as an
/// argument. The recomputation enters a level of its own. LibTorch allows one level for the process, so no other thread
/// may be in a level at the same time.
///
/// Throws ConfigError, naming the label, if `fn` wrote:
/// - in place to a tensor in `args`;
/// - with a gradient to a captured tensor;
/// - to a tensor from outside without memory of its own (a sparse tensor, or a wrapper of other tensors).
///
/// Backward throws:
/// - snug::Error, naming label, operator and its position in the sequence, if the recomputation differs from the
///   forward;
/// - c10::Error, as LibTorch does for a saved tensor, if the recomputation reads memory from outside that was written
///   after the forward.
///
/// Algorithm: torch/utils/checkpoint.py, non-reentrant form (torch 2.13.0), plus the handling of memory and module
/// modes described above.
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

/// The treatment of the last segment. Backward begins with the last segment, so recomputing the last segment saves
/// memory only while the other segments run forward.
enum class LastSegment {
  Plain,      ///< Python's rule: keep the segment's activations
  Recompute,  ///< checkpoint the segment like the others
};

/// Runs `layers` on `input`, layer after layer. With n layers, each of the first `segments` - 1 segments has n /
/// segments layers (rounded down) and is checkpointed; the last segment has the rest. The cuts are those of
/// torch/utils/checkpoint.py.
///
/// With `segments` = 0 the number of segments is about sqrt(n), which is near the least peak if all layers save about
/// as much. If layers differ, or a certain number of bytes must be kept, plan_activations() chooses better
/// (include/snug/plan.h). Throws ConfigError unless 0 <= segments <= n and n > 0.
at::Tensor checkpoint_sequential(const std::vector<std::function<at::Tensor(at::Tensor)>>& layers, int64_t segments,
                                 at::Tensor input, LastSegment last = LastSegment::Plain);

/// The same for the modules of a Sequential. Each module must take one tensor and return one tensor.
at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input,
                                 LastSegment last = LastSegment::Plain);

struct SlicedOptions {
  /// The dimension along which the input is cut and the results are joined. A negative number counts from the end.
  int64_t dim = 0;
  /// The number of slices, at most the length of `dim`. 0: the number that the plan of a Stepper with a budget
  /// asks for, or 1 outside of a plan.
  int64_t slices = 0;
  /// The length of every slice but the last is a multiple of this number: for layers that take, say, groups of four
  /// points.
  int64_t multiple = 1;
  /// Options for the checkpoint of each slice.
  CheckpointOptions checkpoint = {};
};

/// Cuts `input` along `dim` into slices of equal length (the last may be shorter), calls `fn` on each slice as
/// snug::checkpoint does, and returns the results, concatenated along `dim`. With one slice the call is a plain
/// `fn(input)`.
/// - Suitable: an `fn` that treats the positions along `dim` independently (linear layers, pointwise layers, norms of
///   features), or an `fn` that returns a sum or a maximum over the positions with length 1 along `dim`, if the caller
///   then takes the sum or the maximum of the result.
/// - Not suitable: layers that look across `dim` (convolutions along `dim`, attention, BatchNorm's statistics).
/// - The result of a suitable `fn` equals `fn(input)`, up to the rounding of sums. Gradients of parameters are sums
///   over the slices, so gradients differ by the rounding of a sum in another order, and, for a maximum that occurs
///   several times, by LibTorch's division of the gradient among the maxima.
/// - Random layers draw slice after slice, so the numbers differ from the numbers for the whole input.
/// - Inside another `sliced` whose number of slices is left to a plan, give the inner `sliced` a number of its own.
///
/// Throws ConfigError if the input has no dimension `dim`, if slices < 0 or multiple < 1, or if a result has no
/// dimension `dim`.
at::Tensor sliced(const std::function<at::Tensor(at::Tensor)>& fn, const at::Tensor& input, SlicedOptions options = {});

}  // namespace snug
