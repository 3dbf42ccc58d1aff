// bias_gelu against what it replaces, forward alone and with backward: on a GPU, where there is one, in FP16 on 16384 x
// 4096; else on the CPU in BF16 on 2048 x 1024, where it runs ATen's operators and the ratios should be about 1. A copy
// moves as many bytes as the forward pass must: its share of the time is the forward's share of the memory bandwidth.
// See script/bench.

#include "snug/extra/bias_gelu.h"

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "benchmarks/serve.h"

namespace {

using torch::Tensor;
using Function = std::function<Tensor(const Tensor& x, const Tensor& bias)>;

bool on_gpu() { return torch::cuda::is_available(); }

struct Inputs {
  Tensor x, bias, upstream;

  explicit Inputs(torch::ScalarType dtype) {
    const auto options = torch::TensorOptions().device(on_gpu() ? torch::kCUDA : torch::kCPU).dtype(dtype);
    const std::vector<int64_t> shape = on_gpu() ? std::vector<int64_t>{16384, 4096} : std::vector<int64_t>{2048, 1024};
    torch::manual_seed(1);
    x = torch::randn(shape, options);
    bias = torch::randn({shape[1]}, options);
    upstream = torch::randn(shape, options);
  }
};

// A GPU is waited for once for twenty calls, so that the launches overlap as in training.
std::function<void()> timed(std::function<void()> once) {
  return [once = std::move(once)] {
    for (int i = 0; i < (on_gpu() ? 20 : 1); ++i) {
      once();
    }
    if (on_gpu()) {
      torch::cuda::synchronize();
    }
  };
}

snug::benchmarks::Prepare forward(torch::ScalarType dtype, Function function) {
  return [=] {
    return timed([=, in = Inputs(dtype)] {
      const torch::NoGradGuard no_grad;
      function(in.x, in.bias);
    });
  };
}

snug::benchmarks::Prepare with_backward(torch::ScalarType dtype, Function function) {
  return [=] {
    const Inputs in(dtype);
    in.x.set_requires_grad(true);
    in.bias.set_requires_grad(true);
    return timed([=] { torch::autograd::grad({function(in.x, in.bias)}, {in.x, in.bias}, {in.upstream}); });
  };
}

Tensor unfused(const Tensor& x, const Tensor& bias) { return at::gelu(x + bias, "tanh"); }
Tensor gelu_alone(const Tensor& x, const Tensor&) { return at::gelu(x, "tanh"); }
Tensor copied(const Tensor& x, const Tensor&) { return x.clone(); }

}  // namespace

int main() {
  const auto low = on_gpu() ? torch::kHalf : torch::kBFloat16;
  const Function ours = [](const Tensor& x, const Tensor& bias) { return snug::bias_gelu(x, bias); };
  return snug::benchmarks::serve({
      {"snug", forward(low, ours)},
      {"snug_fp32", forward(torch::kFloat, ours)},
      {"unfused", forward(low, unfused)},
      {"gelu_alone", forward(low, gelu_alone)},
      {"copy", forward(low, copied)},
      {"snug_backward", with_backward(low, ours)},
      {"snug_backward_fp32", with_backward(torch::kFloat, ours)},
      {"unfused_backward", with_backward(low, unfused)},
  });
}
