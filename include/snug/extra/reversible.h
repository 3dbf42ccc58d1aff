#pragma once
// ReversibleSequential: a chain of blocks whose inputs can be computed from their outputs. Backward needs only the last
// output, so memory for activations does not grow with depth. The chain has two streams a and b, each half as wide. A
// block with the functions F and G is
//   a += F(b);  b += G(a)        and backwards        b -= G(a);  a -= F(b)
// (Gomez et al. 2017, "The Reversible Residual Network", arXiv:1707.04585; Kitaev et al. 2020, "Reformer",
// arXiv:2001.04451.)
//
//   snug::ReversibleSequential blocks;
//   for (int i = 0; i < 24; ++i) blocks.push_back(Attention(width), Mlp(width));
//   register_module("blocks", blocks.module());                       // for parameters(), train(), to() and state
//   Tensor y = blocks.forward(x);                                     // [..., 2 width] -> [..., 2 width]

#include <cstdint>
#include <functional>
#include <memory>
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

/// Backward rebuilds the input of a half-block, runs the half-block's operators again as checkpoint() does, and goes on
/// to the half-block before. Works with retain_graph, torch::autograd::grad, and inside checkpoint() or another
/// ReversibleSequential.
///
/// The rebuilt inputs differ from the original inputs by rounding: each subtraction adds an error of the size of the
/// type's epsilon times the streams' values, and the functions before the subtraction pass the error on. Gradients are
/// therefore close to the gradients with stored activations, but not equal to the bit. Keep the streams in FP32
/// (autocast does), and normalise the inputs of F and G so that F and G do not amplify the error.
class ReversibleSequential {
 public:
  /// forward(x) halves x along `dim`: -1 for [batch, time, width], 1 for pictures [batch, channels, height, width].
  explicit ReversibleSequential(int64_t dim = -1);

  /// Adds a block. `f` and `g` are modules (holders like torch::nn::Sequential), or callables that own everything they
  /// use: Tensor -> Tensor of the same shape.
  template <class F, class G>
  ReversibleSequential& push_back(F f, G g) {
    add(half(std::move(f)), half(std::move(g)));
    return *this;
  }

  /// Cuts x into the two streams along `dim`, where its size must be even, and returns the resulting streams in
  /// the shape of x. Throws ConfigError for an odd size, for a chain without blocks, or if an F or G changes the shape.
  /// Backward throws as checkpoint() says, with the name of the half-block; and snug::Error if a half-block is asked
  /// for while the chain's forward is not complete and the half-block's input is gone.
  at::Tensor forward(const at::Tensor& x) const;
  /// The same for two separate streams of the same shape.
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor a, at::Tensor b) const;

  /// The blocks' modules: children "0", "1", ..., each with "f" and "g" if F and G are modules.
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

  int64_t dim_;
  std::vector<detail::ReversibleHalf> halves_;  // F and G of the first block, of the second, ...
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace snug
