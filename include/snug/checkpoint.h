#pragma once
// checkpoint: runs a part of the forward without keeping its activations. In backward the part's operators run again. A
// region trades time for memory; gradients are equal to the bit.
//
//   auto y = snug::checkpoint([&](Tensor h) { return block->forward(h); }, x);
//   auto z = snug::checkpoint({.label = "blocks.3", .policy = snug::save_matmuls}, block, x, mask);
//
// A policy chooses results that the region keeps. Matrix products take most of the time and make few of the bytes.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

namespace snug {

/// The treatment of an operator's result in a checkpointed region.
enum class Keep {
  Recompute,  ///< dropped; the operator runs again when backward needs the result
  Save,       ///< kept until the region's backward is done
  Offload,    ///< kept as SaveOnHost with default options keeps a tensor
};

/// Chooses the treatment of the result of each operator that reads a tensor with a gradient, by the operator's name
/// without overload. A policy sees operators below autograd: a linear layer is aten::addmm, or aten::mm and aten::add_.
/// Casts are always recomputed. Views and writes in place go with the memory that they view or write.
using CheckpointPolicy = std::function<Keep(std::string_view operator_name)>;

Keep save_matmuls(std::string_view operator_name);         ///< saves matrix products and convolutions
Keep save_attention(std::string_view operator_name);       ///< saves fused attention
Keep recompute_pointwise(std::string_view operator_name);  ///< saves all but elementwise operators, norms, copies

/// The treatments in `names`, else Keep::Recompute. Throws ConfigError for a name of no operator of LibTorch.
CheckpointPolicy policy_of(std::map<std::string, Keep> names);

struct CheckpointOptions {
  std::string label = {};        ///< names the region in errors
  CheckpointPolicy policy = {};  ///< chooses the results that are kept; empty: no result
};
namespace detail {
/// In gradient mode, the forward on this thread is a region until the end of the scope.
class [[nodiscard]] CheckpointScope final {
 public:
  explicit CheckpointScope(CheckpointOptions options);
  ~CheckpointScope();

 private:
  std::unique_ptr<class Region> region_;
};
}  // namespace detail

/// Calls `fn(args...)` once and returns the result; `fn` may be the holder of a module. Tensors that are saved inside
/// for backward are not kept: in backward, the operators that made them run again as recorded, with the same operands,
/// random numbers and autocast state. Works with retain_graph, create_graph and nested regions.
/// - Kept until backward: what `fn` takes from outside (an enclosing region drops it); results that the policy chooses;
///   results of operators that cannot run again (collectives; sparse or lent memory; a random state of their own);
///   results of custom functions, and values without a gradient that operators with a gradient read, but for random
///   ones.
/// - Random numbers: each operator draws again from a copy of its generator. Exception: LibTorch's operators without a
///   generator (native_dropout, fused attention with dropout on a GPU) draw from the default generator, set back for
///   that moment, in which a draw of another thread repeats numbers.
/// - Written in place: anything. Memory from outside that the region reads and then writes is copied before the write.
/// - Written through a pointer: memory made by operators that read no values (torch::zeros), and values without a
///   gradient that are not random, but not between backward and an operator before it that reads the memory and draws
///   or has a gradient: as if autograd had saved the memory. A custom function that writes more calls mark_dirty.
/// - Backward throws snug::Error, with the label, if memory that is kept and needed was written in place after the
///   region; c10::Error, as LibTorch does, if a saved tensor was.
template <class F, class... Args>
decltype(auto) checkpoint(CheckpointOptions options, F&& fn, Args&&... args) {
  const detail::CheckpointScope region(std::move(options));
  if constexpr (requires { fn.ptr()->forward(std::forward<Args>(args)...); }) {
    return fn.ptr()->forward(std::forward<Args>(args)...);
  } else {
    return std::invoke(std::forward<F>(fn), std::forward<Args>(args)...);
  }
}

template <class F, class... Args>
  requires(!std::is_same_v<std::decay_t<F>, CheckpointOptions>)
decltype(auto) checkpoint(F&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions{}, std::forward<F>(fn), std::forward<Args>(args)...);
}

}  // namespace snug
