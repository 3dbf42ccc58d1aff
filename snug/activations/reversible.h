#pragma once
// ReversibleSequential: a chain of blocks whose inputs can be computed from their outputs, so that backward needs the last output alone:
// memory for activations does not grow with depth. Two streams a and b, each half as wide; a block with the functions F and G is
//   a += F(b);  b += G(a)        and backwards        b -= G(a);  a -= F(b)
// (Gomez et al. 2017, "The Reversible Residual Network", arXiv:1707.04585; Kitaev et al. 2020, "Reformer", arXiv:2001.04451.)
//
//   snug::ReversibleSequential blocks;
//   for (int i = 0; i < 24; ++i) blocks.push_back(Attention(width), Mlp(width));
//   register_module("blocks", blocks.module());                       // parameters(), train(), to() and state reach them
//   Tensor y = blocks.forward(x);                                     // [..., 2 width] -> [..., 2 width]

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace snug {

namespace detail {
struct ReversibleHalf {
  std::function<at::Tensor(at::Tensor)> function;
  std::shared_ptr<torch::nn::Module> module;  // null for a plain callable
};
}  // namespace detail

struct ReversibleOptions {
  /// forward(x) halves x along this dimension: -1 for [batch, time, width], 1 for pictures [batch, channels, height, width].
  int64_t dim = -1;
  /// Recompute with the random numbers of the forward, as checkpoint() does.
  bool preserve_rng_state = true;
  /// As CheckpointOptions::draws_unseen. Off: numbers that no operator draws are drawn anew, and no error.
  bool draws_unseen = false;
};

/// Backward rebuilds what a half-block saw, runs it again as checkpoint() does (same autocast state, same random numbers by default) and
/// goes on to the one before. Works with retain_graph, torch::autograd::grad, and inside checkpoint() or another ReversibleSequential.
/// The rebuilt inputs differ from the first ones by rounding: each subtraction adds an error of the size of the type's epsilon times the
/// streams' values, which the functions before it pass on; so gradients are close to the stored ones', not equal to the bit. Keep the streams in
/// FP32 (autocast does), and F and G from amplifying: normalise their inputs.
class ReversibleSequential {
 public:
  explicit ReversibleSequential(ReversibleOptions options = {});

  /// Adds a block. `f` and `g` are modules (holders like torch::nn::Sequential), or callables that hold what they use, Tensor -> Tensor of
  /// the same shape. Throws ConfigError for a BatchNorm with running statistics in them: it would be moved twice a step; replace it with
  /// GroupNorm or LayerNorm.
  template <class F, class G>
  ReversibleSequential& push_back(F f, G g) {
    add(half(std::move(f)), half(std::move(g)));
    return *this;
  }

  /// x with an even size along options.dim, which becomes the streams, and what they come out as: the same shape. Throws ConfigError for
  /// another size, if there are no blocks, or if an F or G changes the shape. Backward throws snug::Error if a half-block does not do the
  /// same again, or is asked for while the forward of the chain is not yet complete and its input is gone.
  at::Tensor forward(const at::Tensor& x) const;
  /// The same on streams of their own, of one shape.
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor a, at::Tensor b) const;

  /// The blocks' modules: children "0", "1", ..., each with "f" and "g" where those are modules.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  template <class F>
  static detail::ReversibleHalf half(F f) {
    if constexpr (requires { f.ptr(); }) {
      return {[f](at::Tensor x) mutable -> at::Tensor { return f->forward(std::move(x)); }, f.ptr()};
    } else {
      return {std::move(f), nullptr};
    }
  }
  void add(detail::ReversibleHalf f, detail::ReversibleHalf g);

  ReversibleOptions options_;
  std::vector<detail::ReversibleHalf> halves_;  // F and G of the first block, of the second, ...
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace snug
