#pragma once
// Blocks of random models, as in random_blocks.h, that make life hard for who sees operators alone: writes through
// pointers, memory that is lent, storages that are exchanged, operands that an operator lets go of, tensors that are
// filled after autograd saved them, many operators.

#include <algorithm>
#include <vector>

#include <torch/torch.h>

#include "tests/support/random_blocks.h"

namespace snug::testing::blocks {

// Writes through a pointer, and says so.
struct ScaleThroughPointer : torch::autograd::Function<ScaleThroughPointer> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& h, double factor) {
    auto* values = h.data_ptr<float>();
    for (int64_t i = 0; i < h.numel(); ++i) {
      values[i] *= static_cast<float>(factor);
    }
    context->mark_dirty({h});
    context->saved_data["factor"] = factor;
    return h;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * context->saved_data["factor"].toDouble(), Tensor()};
  }
};

inline Layer pointer_writes(Build& b) {
  const auto first = b.linear(b.width, b.width), second = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    const Tensor h = ScaleThroughPointer::apply(first->forward(x).contiguous(), 0.5).tanh();
    return ScaleThroughPointer::apply(second->forward(h).contiguous(), 0.25).sigmoid();
  };
}

// A table on the stack, and one that goes with its tensor.
inline Layer lent_tables(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    std::vector<float> table(static_cast<size_t>(x.size(-1)), 0.125F);
    const Tensor h = linear->forward(x + torch::from_blob(table.data(), {x.size(-1)})).tanh();
    std::fill(table.begin(), table.end(), 1e30F);
    auto* scales = new float[static_cast<size_t>(x.size(-1))];
    std::fill(scales, scales + x.size(-1), 0.5F);
    const auto release = [](void* data) { delete[] static_cast<float*>(data); };
    return h.exp() - torch::from_blob(scales, {x.size(-1)}, release, torch::kFloat);
  };
}

// Correlation by Fourier transforms, with tensors that are conjugated and negated when they are read.
inline Layer conjugates(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    const Tensor spectrum = torch::fft_rfft(linear->forward(x)), other = torch::fft_rfft(x);
    const Tensor correlation = torch::fft_irfft(spectrum * other.conj(), x.size(-1)).tanh();
    return correlation + torch::imag(torch::complex(x.sin(), correlation).conj()).exp();
  };
}

// A tensor that is given the memory of another.
inline Layer exchanged_storage(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    Tensor scratch = torch::ones({1});
    {
      const torch::NoGradGuard no_grad;
      scratch.set_((x * 2).tanh());
    }
    return linear->forward(x * scratch).sin();
  };
}

// Hundreds of small operators, one after the other.
inline Layer unrolled_loop(Build& b) {
  const auto cell = b.linear(b.width, b.width);
  const int64_t steps = 100 + b.below(50);
  return [=](const Tensor& x) {
    Tensor h = torch::zeros({x.size(0), x.size(-1)});
    for (int64_t t = 0; t < steps; ++t) {
      h = torch::tanh(cell->forward(h) + x.select(1, t % x.size(1)));
    }
    return x * h.unsqueeze(1);
  };
}

// Each picture with its own statistics, of which autograd saves copies before they are moved.
inline Layer instance_norm(Build& b) {
  const auto conv = b.conv(b.width, b.width, 3);
  const auto norm =
      b.add(nn::InstanceNorm2d(nn::InstanceNorm2dOptions(b.width).affine(true).track_running_stats(true)));
  return [=](const Tensor& x) { return norm->forward(conv->forward(x)).relu(); };
}

}  // namespace snug::testing::blocks
